"""Kernels: loops, phases and stores, independent of which buffers they touch.

A kernel walks ``rows``; within a row it walks ``columns`` once per phase. A phase reads what earlier phases of
the same row reduced. Memory is addressed by flat offsets into numbered parameters, so kernels that differ only
in their buffers are equal and are compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchkiln.ir.expr import Expr
from torchkiln.ir.index import Extent, Index, Size, Var

# Terms of a float sum that a lane adds one after the other; beyond twice as many, chunks of this many are summed by
# themselves first, and chunks of chunks. Equal terms are all rounded in one direction, so the error grows with the
# longest run: 1e7 times 0.1 was off by 2.3e-5 with runs of 2,441 and is by 1.1e-7 so, eager's cascade by 5.8e-7.
# Runs of 32 are off by 3.9e-7 and no faster.
SUM_CHUNK = 16


@dataclass(frozen=True)
class Parameter:
    """A pointer parameter: what it points to."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Scratch:
    """A row of values kept from one phase to the next, per thread."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Store:
    """``parameter[offset] = value``; a ``str`` parameter names a scratch row."""

    parameter: int | str
    offset: Index
    value: Expr


@dataclass(frozen=True)
class Accumulate:
    """Fold ``value`` into reduction ``name``. ``position`` orders the points for argmax and argmin."""

    name: str
    reducer: str
    value: Expr
    position: Index


Statement = Store | Accumulate


@dataclass(frozen=True)
class Phase:
    """``before`` runs once per row, then ``inside`` for every column point of the row."""

    before: tuple[Store, ...]
    inside: tuple[Statement, ...]


@dataclass(frozen=True)
class Kernel:
    """One function to generate.

    ``rows`` and ``columns`` are loop variables, outermost first, ``vector`` the one computed several lanes at a
    time (always the last of its list), or None for a single point. Parallel iterations run over the points of
    ``rows[:parallel_rows]``, times ``blocks`` of ``block`` values each of the last variable that is not counted
    there: the vector, or ``tile``, along which some loads run that the vector crosses. ``sizes`` are numbers each
    launch passes, in terms of which every extent and index is written. A kernel that ``may_fail`` reports that there is
    no memory for a row of scratch.
    """

    parameters: tuple[Parameter, ...]
    sizes: tuple[Size, ...]
    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    vector: Var | None
    tile: Var | None
    parallel_rows: int
    blocks: Extent
    block: int
    phases: tuple[Phase, ...]
    scratch: tuple[Scratch, ...]
    parallel_extent: Extent
    grain: Extent
    may_fail: bool

    def __str__(self) -> str:
        loops = f"rows {_extents(self.rows)} columns {_extents(self.columns)} vector {self.vector} tile {self.tile}"
        lines = [
            f"kernel {loops} blocks {self.blocks} of {self.block} parallel {self.parallel_extent} grain {self.grain}"
        ]
        for phase in self.phases:
            lines += [f"  p{s.parameter}[{s.offset}] = {s.value}" for s in phase.before]
            for statement in phase.inside:
                if isinstance(statement, Store):
                    lines.append(f"    p{statement.parameter}[{statement.offset}] = {statement.value}")
                else:
                    lines.append(f"    {statement.name} = {statement.reducer}({statement.value})")
        return "\n".join(lines)


def _extents(variables: Sequence[Var]) -> str:
    return ", ".join(f"{v.name} < {v.extent}" for v in variables) or "none"
