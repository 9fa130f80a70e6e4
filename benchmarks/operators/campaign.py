"""Goes through cells: those on record are taken from there, the others measured in a process that is kept warm."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.operators.cells import Cell
from benchmarks.operators.measure import Effort
from benchmarks.operators.records import ROOT, Record, counts, new_record, read
from torchkiln.bench.load import LoadWatch
from torchkiln.bench.process import Process, WorkerFailed
from torchkiln.bench.records import OURS, Figures, append

# Cells of one process: what compilations leave behind, in Dynamo and in the allocator, grows with them.
_CELLS_PER_PROCESS = 200


# Freed memory stays in the process. Else whoever runs after a call that gave its pages back has them faulted in again:
# the gradient of a flip of 3 MiB took eager 2190 µs at first and 223 µs once the library had learned to keep it.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


class Workers:
    """One process at a time, replaced where it died, has served long, or has another number of threads."""

    def __init__(self, caches: Path, limit: float) -> None:
        self._caches, self._limit = caches, limit
        self._process: Process | None = None
        self._threads = self._cells = 0

    def measure(self, cell: Cell, backends: Sequence[str], effort: Effort) -> dict[str, Any]:
        """What the process answers; where it fails, figures of ours that say so."""
        order = {**asdict(cell), "backends": list(backends), "effort": asdict(effort)}
        del order["threads"]
        try:
            return self._started(cell.threads).ask("measure", **order)
        except WorkerFailed as failure:
            if self._process is not None and self._process.has_ended:
                self.close()
            return {"figures": {name: asdict(Figures(failure=str(failure))) for name in backends if name == OURS}}

    def _started(self, threads: int) -> Process:
        if self._process is not None and (threads != self._threads or self._cells >= _CELLS_PER_PROCESS):
            self.close()
        if self._process is None:
            environment = {
                **os.environ,
                **_KEEP_MEMORY,
                "KILN_CACHE": "0",
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                "TORCHINDUCTOR_CACHE_DIR": str(self._caches),
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, "-m", "benchmarks.operators.worker", str(threads)]
            self._process = Process(command, environment, self._limit)
            self._threads, self._cells = threads, 0
            self._process.answer()
        self._cells += 1
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def run(
    cells: Sequence[Cell],
    backends: Sequence[str],
    effort: Effort,
    *,
    path: Path,
    limit: float,
    end: float,
    again: bool,
    command: str,
    say: Callable[[Cell], None] = lambda _: None,
) -> Iterator[tuple[Record, bool]]:
    """The records of these cells, and whether each was made now, until the clock shows ``end``.

    ``limit`` is in seconds, for one cell; ``command`` is what was typed, for the record.
    """
    known = {} if again else read(path)
    with ExitStack() as stack:
        caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="operators-", ignore_cleanup_errors=True))
        workers = Workers(Path(caches), limit)
        stack.callback(workers.close)
        for cell in cells:
            record = known.get(cell)
            if record is not None and counts(record, backends, effort):
                yield record, False
            elif time.monotonic() < end:
                say(cell)
                watch = LoadWatch()
                answer = workers.measure(cell, backends, effort)
                record = new_record(cell, answer, command, effort, watch.load())
                append(path, record)
                yield record, True
