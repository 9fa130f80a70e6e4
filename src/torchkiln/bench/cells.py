"""What one comparison is about: a cell of models × {inference, training} × {float32, bfloat16} × {static, dynamic}."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Job(StrEnum):
    inference = "inference"
    training = "training"


class Precision(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Shapes(StrEnum):
    """``dynamic`` compiles for symbolic sizes, on inputs of one size, and times steps on another."""

    static = "static"
    dynamic = "dynamic"


@dataclass(frozen=True)
class Cell:
    entry: str
    job: Job
    precision: Precision
    shapes: Shapes

    @property
    def kind(self) -> str:
        """All but the entry."""
        return f"{self.job} {self.precision} {self.shapes}"

    def __str__(self) -> str:
        return f"{self.entry} {self.kind}"


def cells(
    entries: Sequence[tuple[str, Sequence[Job]]],
    jobs: Sequence[Job],
    precisions: Sequence[Precision],
    shapes: Sequence[Shapes],
) -> Iterator[Cell]:
    """All combinations, for each entry those of the jobs it has."""
    for name, its_jobs in entries:
        for job in jobs:
            if job in its_jobs:
                yield from (Cell(name, job, precision, shape) for precision in precisions for shape in shapes)
