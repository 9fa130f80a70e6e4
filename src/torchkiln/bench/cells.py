"""What one comparison is about: a cell of models × {inference, training} × precisions × {static, dynamic}."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Job(StrEnum):
    inference = "inference"
    training = "training"


class Precision(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"

    @property
    def dtype(self) -> torch.dtype:
        """Of the model as it is built; one that is quantized is built in float32."""
        return torch.bfloat16 if self is Precision.bfloat16 else torch.float32


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
    """All combinations, for each entry those of the jobs it has; int8 is for inference of static sizes."""
    for name, its_jobs in entries:
        for job, precision, shape in itertools.product(jobs, precisions, shapes):
            fits = precision is not Precision.int8 or (job is Job.inference and shape is Shapes.static)
            if job in its_jobs and fits:
                yield Cell(name, job, precision, shape)
