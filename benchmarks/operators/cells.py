"""What one comparison is about: an entry × layout × dtype × {forward, backward} × threads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.operators.layouts import Layout


class Job(StrEnum):
    """``backward`` is the forward call with gradients recorded, and the gradients of its differentiable inputs."""

    forward = "forward"
    backward = "backward"


DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Cell:
    entry: str
    layout: Layout
    dtype: str
    job: Job
    threads: int

    @property
    def kind(self) -> str:
        """All but the entry."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.layout} {self.dtype} {self.job} {threads}"

    def __str__(self) -> str:
        return f"{self.entry} {self.kind}"


def cells(
    entries: Iterable[tuple[str, Sequence[Layout]]],
    layouts: Sequence[Layout],
    dtypes: Sequence[str],
    threads: Sequence[int],
) -> list[Cell]:
    """All combinations, for each entry those of the layouts it has.

    Those on one number of threads stand together, and among them those of one entry and dtype, which share arguments.
    """
    known = list(entries)
    return [
        Cell(name, layout, dtype, job, number)
        for number in threads
        for name, its_layouts in known
        for dtype in dtypes
        for layout in layouts
        if layout in its_layouts
        for job in Job
    ]


def sample(all_cells: Sequence[Cell], number: int) -> list[Cell]:
    """So many of them in their order, the same ones in every run; all where ``number`` is 0."""
    if not number or number >= len(all_cells):
        return list(all_cells)
    kept = set(random.Random(0).sample(range(len(all_cells)), number))
    return [cell for k, cell in enumerate(all_cells) if k in kept]
