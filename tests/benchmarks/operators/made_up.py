"""Records with figures that a reader can compute ratios of in the head."""

from __future__ import annotations

from benchmarks.operators.cells import Cell, Job
from benchmarks.operators.layouts import Layout
from benchmarks.operators.measure import Effort
from benchmarks.operators.records import Record, new_record
from torchkiln.bench.load import Load


def cell(entry: str = "relu", layout: Layout = Layout.contiguous, threads: int = 1) -> Cell:
    return Cell(entry, layout, "float32", Job.forward, threads)


def answer(overhead_us: float = 10.0, **microseconds: tuple[float, ...]) -> dict[str, object]:
    """What a process says of backends with these rounds."""
    figures = {
        name: {"ms": sorted(rounds)[len(rounds) // 2] / 1000, "rounds": [us / 1000 for us in rounds]}
        for name, rounds in microseconds.items()
    }
    return {"figures": figures, "sizes": "768×1024", "wrong": "", "overhead_us": overhead_us}


def record(entry: str, overhead_us: float = 10.0, **microseconds: tuple[float, ...]) -> Record:
    return new_record(cell(entry), answer(overhead_us, **microseconds), "typed", Effort(), Load())
