"""The processes of one cell, a backend each, running in turns: noise of the machine hits all of them alike."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchkiln.bench.backends import BACKENDS
from torchkiln.bench.cells import Cell
from torchkiln.bench.load import Load, LoadWatch
from torchkiln.bench.process import Process, WorkerFailed
from torchkiln.bench.records import LARGEST_ERROR, Figures, percent, spread, uncertainty
from torchkiln.bench.resident import tree_mib


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of a round, how many rounds there are of each backend, and seconds of a first call.

    There are at least ``rounds``, and more until all backends together took ``together`` seconds or there are
    ``plenty``. Where medians are then not known to within ``certain`` of themselves, rounds go on until all backends
    together took ``patience`` seconds, however many that makes; where one is unreliable, until ``utmost``.
    Many short rounds do better than few long ones: a machine's speed changes by half from one second to the next, and
    of seven rounds of 0.3 s those of the smallest networks differed by a factor of 2.7 within one process.
    """

    rounds: int = 5
    plenty: int = 31
    seconds: float = 0.1
    together: float = 12.0
    certain: float = 0.03
    patience: float = 24.0
    utmost: float = 96.0
    limit: float = 900.0

    def is_enough(self, rounds: Collection[Sequence[float]], seconds: float) -> bool:
        """Whether the rounds of each backend will do, after so many seconds."""
        number = min(map(len, rounds), default=self.plenty)
        if number < self.rounds or (number < self.plenty and seconds <= self.together):
            return False
        worst = max(map(uncertainty, rounds), default=0.0)
        return worst <= self.certain or seconds > (self.utmost if worst > LARGEST_ERROR else self.patience)


QUICK = Effort(rounds=3, plenty=9, seconds=0.05, together=3.0, patience=3.0, utmost=12.0, limit=300.0)


class Worker(Process):
    """The process of one backend in one cell."""

    def __init__(self, cell: Cell, backend: str, threads: int, caches: Path, limit: float) -> None:
        command = [sys.executable, "-m", "torchkiln.bench.worker", cell.entry, cell.job, cell.precision, cell.shapes]
        super().__init__([*command, backend, str(threads)], _environment(caches, backend), limit)

    def first_call(self) -> tuple[dict[str, Any], float]:
        """The answer to the order "first", and the most MiB seen meanwhile of the process and all that it started."""
        seen = [0.0]
        self._order("first")
        found = self.answer(lambda: seen.append(tree_mib(self._process.pid)))
        return found, max(*seen, tree_mib(self._process.pid))


def _environment(caches: Path, backend: str) -> dict[str, str]:
    """Nothing compiled earlier is found again, and nothing is fetched."""
    known = BACKENDS.get(backend)
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "XDG_CACHE_HOME": str(caches / "xdg"),
        "KILN_CACHE_DIR": str(caches / "kiln"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        **(known.environment if known is not None else {}),
    }


@contextmanager
def _worker(cell: Cell, backend: str, threads: int, limit: float) -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="kiln-bench-", ignore_cleanup_errors=True) as caches:
        worker = Worker(cell, backend, threads, Path(caches), limit)
        try:
            yield worker
        finally:
            worker.close()


@dataclass(frozen=True)
class Measurement:
    """Figures by backend, and what else the machine did during the rounds."""

    figures: Mapping[str, Figures]
    load: Load


def measure(
    cell: Cell, backends: Sequence[str], effort: Effort, threads: int, say: Callable[[str], None]
) -> Measurement:
    """Figures of every backend in one cell, from rounds in turns.

    The processes start together; first calls are made one after the other, once all of them are ready.
    """
    figures: dict[str, Figures] = {}
    running: dict[str, Worker] = {}

    @contextmanager
    def until_failure(backend: str) -> Iterator[None]:
        try:
            yield
        except WorkerFailed as failure:
            figures[backend] = Figures(failure=str(failure))
            running.pop(backend).close()

    with ExitStack() as stack:
        # Imports, models and calibrations side by side: none of it is timed, and in int8 they take longer than rounds.
        say(f"{cell}: building the model in {len(backends)} processes")
        for backend in backends:
            running[backend] = stack.enter_context(_worker(cell, backend, threads, effort.limit))
        for backend, worker in list(running.items()):
            with until_failure(backend):
                worker.answer()
        for backend, worker in list(running.items()):
            say(f"{cell}: {backend}, first call")
            with until_failure(backend):
                first, seen_mib = worker.first_call()
                figures[backend] = Figures(first_seconds=first["seconds"], peak_mib=seen_mib)
        rounds: dict[str, list[float]] = {backend: [] for backend in running}
        begin, watch = time.monotonic(), LoadWatch()
        for number in itertools.count():
            if effort.is_enough([rounds[backend] for backend in running], time.monotonic() - begin):
                break
            known = ", ".join(f"{name} ± {percent(spread(rounds[name]))}" for name in running if number > 1)
            say(f"{cell}: round {number + 1}" + (f" ({known})" if known else ""))
            # Every other round goes the other way, so that nobody always runs after the same one.
            for backend in list(running)[:: -1 if number % 2 else 1]:
                with until_failure(backend):
                    rounds[backend].append(running[backend].ask("round", seconds=effort.seconds)["ms"])
                    time.sleep(0.01)
        load = watch.load()
        for backend, worker in list(running.items()):
            with until_failure(backend):
                figures[backend] = _finished(worker, figures[backend], rounds[backend])
    return Measurement({backend: figures[backend] for backend in backends}, load)


def _finished(worker: Worker, of_first_call: Figures, rounds: Sequence[float]) -> Figures:
    """All figures of a worker that got through its rounds."""
    memory = worker.ask("memory")
    checked = worker.ask("check")
    return replace(
        of_first_call,
        ms=statistics.median(rounds),
        rounds=tuple(rounds),
        peak_mib=max(of_first_call.peak_mib, memory["peak"]),
        process_mib=memory["peak"],
        step_mib=memory["steps"],
        difference=checked["difference"],
        externs=checked["externs"],
        launches=checked["launches"],
        fallbacks=tuple(checked["fallbacks"]),
        slower=tuple(checked["slower"]),
    )
