"""What many cells say together: geometric means of ratios, and the cell that is worst.

Cells in which one of the two failed, or is unreliable, are not among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchkiln.bench.records import Record


@dataclass(frozen=True)
class Summary:
    """``speedup`` above 1 is faster than ``against``; ``first_call`` and ``memory`` below 1 are less than its."""

    backend: str
    against: str
    cells: int
    speedup: float
    least: float
    least_at: str
    first_call: float
    memory: float

    @property
    def row(self) -> tuple[str, ...]:
        """Its figures as text, under ``SUMMARY_TITLES``."""
        return (
            self.backend,
            self.against,
            str(self.cells),
            f"{self.speedup:.2f} ×",
            f"{self.least:.2f} ×",
            self.least_at,
            f"{self.first_call:.2f} ×",
            f"{self.memory:.2f} ×",
        )


SUMMARY_TITLES = ("backend", "against", "cells", "speed-up", "least", "at", "first call", "memory of steps")
SUMMARY_WORDS = frozenset(("backend", "against", "at"))
"""Columns that hold words; the others hold numbers."""


def summaries(records: Sequence[Record]) -> Iterator[Summary]:
    """Our backend against every other one, and every other one against eager."""
    names = list(dict.fromkeys(name for record in records for name in record.figures))
    pairs = [("kiln", other) for other in names if other != "kiln"]
    pairs += [(other, "eager") for other in names if other not in ("kiln", "eager")]
    for backend, against in pairs:
        both = [r for r in records if r.speedup(backend, against) is not None]
        if both:
            yield _summary(both, backend, against)


def _summary(records: Sequence[Record], backend: str, against: str) -> Summary:
    ratios = [(r.figures[against].ms / r.figures[backend].ms, str(r.cell)) for r in records]
    least, at = min(ratios)
    mine, others = [r.figures[backend] for r in records], [r.figures[against] for r in records]
    return Summary(
        backend,
        against,
        len(records),
        geometric_mean([ratio for ratio, _ in ratios]),
        least,
        at,
        geometric_mean([m.first_seconds / o.first_seconds for m, o in zip(mine, others, strict=True)]),
        geometric_mean([m.step_mib / o.step_mib for m, o in zip(mine, others, strict=True) if o.step_mib]),
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else math.nan
