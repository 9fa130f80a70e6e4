"""Many programs, in several processes, with progress, and a table at the end of what they covered.

    python -m tests.programs.campaign --count 2000 --workers 2

Programs come in blocks; a block is one hypothesis run from a fixed seed, so it is the same programs each time. What a
block found is written to ``results/programs``; a block found there is not run again. A failing program, made as small
as hypothesis can, is a file there that runs on its own. A program that kills its process is such a file as it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.programs.check import Different, check
from tests.programs.generate import programs
from tests.programs.program import Program

# What an earlier run left on disk must not decide a verdict.
os.environ.setdefault("KILN_CACHE", "0")

BLOCK = 50
# A process is replaced after this many blocks: Dynamo's caches grow.
BLOCKS_PER_PROCESS = 4
# A block takes 20 s on a quiet core, and minutes where a failing program is made smaller.
TIME_LIMIT = 1800.0
OUTPUT = Path("results/programs")


def run_block(
    number: int, most: int = BLOCK, *, shrink: bool = True, begin: Callable[[Program], None] = lambda _: None
) -> dict[str, Any]:
    """What the programs of block ``number`` gave: how many of each verdict, what they covered, and what failed.

    ``begin`` is called with each program before it runs.
    """
    verdicts: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    seen: set[str] = set()
    failure: list[Different] = []

    def one(program: Program | None) -> None:
        if program is None:
            return
        key = f"{program.source()}{program.sizes}{program.mode}{program.precision}"
        if key in seen:
            return
        try:
            begin(program)
            verdict = check(program)
        except Different as different:
            failure[:] = [different]
            raise
        # Only now: hypothesis runs a failing program again, and must see it fail again.
        seen.add(key)
        if failure:
            return  # an attempt to make the failing program smaller
        verdicts[verdict] += 1
        if verdict == "same":
            for statement in program.statements:
                dtype = str(statement.dtype).removeprefix("torch.")
                covered[f"{statement.operator}|{dtype}|{program.mode}"] += 1
            for feature in program.features():
                covered[f"({feature})|-|{program.mode}"] += 1

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    within = settings(
        max_examples=most, deadline=None, database=None, report_multiple_bugs=False, phases=phases,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    started = time.perf_counter()
    try:
        seed(number)(within(given(programs())(one)))()
    except Different:
        verdicts["different"] += 1
    return {
        "block": number,
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "verdicts": dict(verdicts),
        "covered": dict(covered),
        "complaints": failure[0].complaints if failure else [],
        "script": failure[0].script if failure else None,
    }


def _serve(pipe: Connection) -> None:
    """The far side of a worker: runs the blocks it is sent, and says which program it is at."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # what a capture refuses is counted, not logged
    warnings.simplefilter("ignore")
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        try:
            result = run_block(number, begin=lambda program: pipe.send(program))
        except Exception as error:  # a mistake of the generator: shown, not hidden
            result = _nothing(number, "broken", repr(error), None)
        pipe.send(result)


def _nothing(number: int, verdict: str, complaint: str, script: str | None) -> dict[str, Any]:
    return {"block": number, "verdicts": {verdict: 1}, "covered": {}, "complaints": [complaint], "script": script}


class _Worker:
    """The near side of a process, which is replaced when it dies, takes too long or has done a few blocks."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None
        self._blocks = 0

    def run(self, number: int) -> dict[str, Any]:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, far = context.Pipe()
            self._process = context.Process(target=_serve, args=(far,), daemon=True)
            self._process.start()
            far.close()
            self._blocks = 0
        result = self._follow(number)
        self._blocks += 1
        if self._blocks >= BLOCKS_PER_PROCESS:
            self.stop()
        return result

    def _follow(self, number: int) -> dict[str, Any]:
        self._pipe.send(number)
        program: Program | None = None
        end = time.monotonic() + TIME_LIMIT
        while True:
            try:
                if not self._pipe.poll(max(0.0, end - time.monotonic())):
                    why = f"the block took longer than {TIME_LIMIT:.0f} s"
                    break
                message = self._pipe.recv()
            except (EOFError, OSError):
                self._process.join(10)
                why = f"the process died with exit code {self._process.exitcode}"
                break
            if isinstance(message, dict):
                return message
            program = message
        self.stop()
        script = program.script([{} for _ in program.sizes]) if program is not None else None
        return _nothing(number, "crashed", why, script)

    def stop(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def _run_blocks(numbers: Iterator[int], workers: int, wanted: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Results as they come, from several processes, until no more are ``wanted``."""
    results: Queue[dict[str, Any] | None] = Queue()
    lock = threading.Lock()

    def work() -> None:
        worker = _Worker()
        try:
            while wanted():
                with lock:
                    number = next(numbers)
                results.put(worker.run(number))
        finally:
            worker.stop()
            results.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < workers:
        result = results.get()
        if result is None:
            ended += 1
        else:
            yield result


def table(results: list[dict[str, Any]]) -> str:
    """Verdicts, then how often each operator gave each dtype, and in which modes."""
    verdicts: Counter[str] = Counter()
    cells: Counter[tuple[str, str]] = Counter()
    modes: Counter[tuple[str, str]] = Counter()
    for result in results:
        verdicts.update(result["verdicts"])
        for key, times in result["covered"].items():
            operator, dtype, mode = key.split("|")
            cells[operator, dtype] += times
            modes[operator, mode] += times
    dtypes = sorted({d for _, d in cells})
    kinds = sorted({m for _, m in modes})
    width = max([len(o) for o, _ in cells], default=8)
    columns = [(d, len(d), cells) for d in dtypes] + [(m, len(m), modes) for m in kinds]
    lines = ["operator".ljust(width) + "".join(f"  {name}" for name, _, _ in columns)]
    for operator in sorted({o for o, _ in cells}):
        row = "".join(f"  {counts[operator, name] or '-':>{size}}" for name, size, counts in columns)
        lines.append(operator.ljust(width) + row)
    total = ", ".join(f"{times} {verdict}" for verdict, times in sorted(verdicts.items()))
    return "\n".join([*lines, "", f"{sum(verdicts.values())} programs: {total or 'none'}"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="programs in all (2000)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--first", type=int, default=0, help="the first block (0); each has its own programs")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"where results are kept ({OUTPUT})")
    parser.add_argument("--again", action="store_true", help="run blocks again that are there already")
    chosen = parser.parse_args(arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    started = time.monotonic()

    def agreed() -> int:
        return sum(result["verdicts"].get("same", 0) for result in results)

    def take(result: dict[str, Any]) -> None:
        results.append(result)
        failed = sum(bool(r["complaints"]) for r in results)
        so_far = f"{agreed()} of {chosen.count} the same, {failed} failed, {time.monotonic() - started:.0f} s"
        print(f"block {result['block']}: {result['verdicts']}, {so_far}", flush=True)
        if result["complaints"]:
            print("\n".join(result["complaints"]) + "\n\n" + (result["script"] or ""), flush=True)

    def missing() -> Iterator[int]:
        for number in count(chosen.first):
            kept = _kept(chosen, number)
            if kept is None:
                yield number
            else:
                take(kept)

    for result in _run_blocks(missing(), chosen.workers, lambda: agreed() < chosen.count):
        _keep(chosen.output, result)
        take(result)
    failed = any(result["complaints"] for result in results)
    print(table(results))
    return 1 if failed else 0


def _kept(chosen: argparse.Namespace, number: int) -> dict[str, Any] | None:
    path = chosen.output / f"block-{number}.json"
    if chosen.again or not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    # What failed is tried again: that is what one is working on.
    return None if found["complaints"] else found


def _keep(output: Path, result: dict[str, Any]) -> None:
    (output / f"block-{result['block']}.json").write_text(json.dumps(result))
    script = output / f"failure-{result['block']}.py"
    if result["script"]:
        script.write_text(result["script"])
    else:
        script.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
