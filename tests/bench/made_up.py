"""Records with figures that a reader can compute ratios of in the head."""

from __future__ import annotations

from collections.abc import Mapping

from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.records import Figures, Record


def figures(ms: float, first: float = 1.0, mib: float = 100.0, **others: object) -> Figures:
    """Three rounds around ``ms``, whose quartiles are 10 % below and above it."""
    return Figures(
        first_seconds=first,
        ms=ms,
        rounds=(ms, 0.9 * ms, 1.1 * ms),
        peak_mib=2 * mib,
        process_mib=1.5 * mib,
        step_mib=mib,
        **others,  # type: ignore[arg-type]
    )


def record(entry: str, given: Mapping[str, Figures], *, job: Job = Job.inference, **others: object) -> Record:
    facts: dict[str, object] = {
        "machine": "A processor, 2 cores",
        "versions": {"python": "3.12.0", "torch": "2.13.0"},
        "source": "0123456789abcdef",
        "day": "2026-01-02",
        "threads": 2,
        "command": "kiln bench --quick",
    }
    cell = Cell(entry, job, Precision.float32, Shapes.static)
    return Record(cell, given, **{**facts, **others})  # type: ignore[arg-type]
