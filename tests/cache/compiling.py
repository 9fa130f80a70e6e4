"""Processes that compile the same graphs into one empty cache, and are killed: ``python -m tests.cache.compiling``.

All begin at once, each in an order of its own. Killed are those that run the stages at the moment, after a random time;
another takes the place of each. Every process compares all its results with eager. At the end one process more finds
all graphs in the cache, and every entry is verified.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.cache.graphs import graphs
from tests.cache.keys import new_cache
from tests.processes import environment

# Seconds after the choice of a process at which it is killed, at most. A graph is in the stages for 0.05 to 2.
_LONGEST_PAUSE = 0.5


# -- a process --------------------------------------------------------------------------------------------------------


def compile_all(names: Sequence[str], seed: int, begin: Path | None = None) -> None:
    """Compile the graphs of these names, compare them with eager, and print a line for all that happens."""
    from torchkiln import compiler

    compile_graph = compiler.compile_graph

    def told(*given: object, **options: object) -> object:
        _tell("stages")
        artifact = compile_graph(*given, **options)  # type: ignore[arg-type]
        _tell("compiled")
        return artifact

    compiler.compile_graph = told  # type: ignore[assignment]
    known, order = graphs(), list(names)
    random.Random(seed).shuffle(order)
    _tell("ready")
    while begin is not None and not begin.exists():
        time.sleep(0.01)
    for name in order:
        _tell(f"graph {name}")
        graph = known[name]
        torch._dynamo.reset()
        options = {"fallback": False, "adaptive": False}
        graph.compare(torch.compile(graph.function, backend="kiln", dynamic=graph.dynamic, options=options))
    _tell("done")


def _tell(line: str) -> None:
    print(line, flush=True)


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process and the lines it has printed."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, folder: Path, names: Sequence[str], seed: int) -> Worker:
        log = folder / f"{seed}.log"
        own = environment(KILN_CACHE="1", KILN_CACHE_DIR=str(folder / "cache"), OMP_NUM_THREADS="1")
        command = [sys.executable, "-m", "tests.cache.compiling", "--compile", *names, "--seed", str(seed)]
        with log.open("wb") as output:
            started = subprocess.Popen(
                [*command, "--begin", str(folder / "begin")], env=own, stdout=output, stderr=subprocess.STDOUT
            )
        return cls(started, log)

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def state(self) -> str:
        return next(iter(self.lines[::-1]), "")

    def compiled(self) -> Iterator[str]:
        """The graph of each run of the stages that ended; a training graph has two."""
        name = ""
        for line in self.lines:
            if line.startswith("graph "):
                name = line.removeprefix("graph ")
            elif line == "compiled":
                yield name

    def reject_failure(self) -> None:
        """Raise what went wrong in a process that ended by itself."""
        if self.process.poll() not in (None, 0):
            raise AssertionError("\n".join(self.lines[-40:]))


def least_runs(names: Sequence[str]) -> int:
    """How often the stages run where every graph is compiled once: backwards have a run of their own."""
    known = graphs()
    return sum(1 + known[name].train for name in names)


@dataclass
class Outcome:
    """What the processes of one round did. ``killed`` has what each was doing."""

    killed: Counter[str] = field(default_factory=Counter)
    compiled: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    entries: int = 0


def compile_and_kill(
    folder: Path,
    names: Sequence[str],
    processes: int,
    kills: int,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """One round: ``processes`` compile the graphs into an empty cache, and up to ``kills`` of them are killed."""
    moments, outcome = random.Random(seed), Outcome()
    running = [Worker.start(folder, names, k) for k in range(processes)]
    everyone = list(running)
    try:
        while not all(worker.state == "ready" for worker in running):
            _reject_failures(running)
            time.sleep(0.05)
        (folder / "begin").touch()
        next_line = 0.0
        while any(worker.process.poll() is None for worker in running):
            compiled = sum(line == "compiled" for worker in everyone for line in worker.lines)
            if outcome.killed.total() < kills * min(1, (compiled + 1) / len(names)):  # all through the round
                _kill_one(running, outcome, moments)
                while len(running) < processes:
                    running.append(Worker.start(folder, names, len(everyone)))
                    everyone.append(running[-1])
            if time.monotonic() > next_line:
                done = sum(line.startswith("graph ") for worker in running for line in worker.lines)
                tell(f"  {done} of {processes * len(names)} graphs begun, {outcome.killed.total()} processes killed")
                next_line = time.monotonic() + 5
            _reject_failures(running)
            time.sleep(0.02)
        _reject_failures(running)
    finally:
        for worker in everyone:
            worker.process.kill()
            worker.process.wait()
    outcome.compared = sum(line.startswith("graph ") for worker in running for line in worker.lines)
    outcome.compiled = Counter(name for worker in everyone for name in worker.compiled())
    last = Worker.start(folder, names, len(everyone))
    last.process.wait()
    last.reject_failure()
    assert not list(last.compiled()), f"not in the cache: {sorted(set(last.compiled()))}"
    outcome.entries = _verified_entries(folder / "cache")
    return outcome


def _reject_failures(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.reject_failure()


def _kill_one(running: list[Worker], outcome: Outcome, moments: random.Random) -> None:
    """Kill one of those that run the stages, if any does, a random time from now."""
    compiling = [worker for worker in running if worker.state == "stages"]
    if not compiling:
        return
    victim = moments.choice(compiling)
    time.sleep(moments.uniform(0, _LONGEST_PAUSE))
    victim.process.kill()
    if victim.process.wait() != -9:
        return  # it had ended
    outcome.killed[_doing(victim.state)] += 1
    running.remove(victim)


def _doing(state: str) -> str:
    if state == "stages":
        return "in the stages"
    return "storing, loading or running" if state == "compiled" else "tracing, waiting or looking up"


def _verified_entries(path: Path) -> int:
    cache = new_cache(path)
    files = list(cache.folder.files())
    damaged = [file.digest for file in files if cache.verified_bytes(file.digest) is None]
    assert not damaged, f"damaged: {damaged}"
    return len(files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--kills", type=int, default=12, help="in each round, while there is something to compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        compile_all(asked.compile, asked.seed, asked.begin)
        return
    names = list(graphs())
    for number in range(asked.rounds):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            seed = asked.seed + number
            outcome = compile_and_kill(Path(folder), names, asked.processes, asked.kills, seed, tell=_tell)
        doing = ", ".join(f"{count} {what}" for what, count in outcome.killed.items())
        print(
            f"round {number + 1}, {time.monotonic() - began:.0f} s: {asked.processes} processes,"
            f" {outcome.killed.total()} killed ({doing})\n"
            f"  {outcome.compared} graphs compared with eager, all the same; compiled {outcome.compiled.total()} times,"
            f" backwards included, where {least_runs(names)} is the least\n"
            f"  another process compiled nothing; {outcome.entries} entries, all verified",
            flush=True,
        )


if __name__ == "__main__":
    main()
