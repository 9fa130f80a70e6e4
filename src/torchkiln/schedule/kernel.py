"""Kernels: a loop nest, and how it is mapped to the device.

A nest walks ``rows``; within a row it walks ``columns`` once per phase. A phase reads what earlier phases of
the same row reduced. Memory is addressed by flat offsets into numbered parameters, so kernels that differ only
in their buffers are equal and are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, KernelMemory
from torchkiln.ir.index import Extent, Index, Size, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.group import loops_text


@dataclass(frozen=True)
class Store:
    """``memory[offset] = value``."""

    memory: KernelMemory
    offset: Index
    value: Expr

    def mapped(self, index: Callable[[Index], Index], value: Callable[[Expr], Expr]) -> Store:
        return Store(self.memory, index(self.offset), value(self.value))

    def __str__(self) -> str:
        return f"{self.memory}[{self.offset}] = {self.value}"


@dataclass(frozen=True)
class Accumulate:
    """Fold ``value`` into reduction ``name``. ``index`` is that of the point, for argmax and argmin."""

    name: str
    reducer: str
    value: Expr
    index: Index

    def mapped(self, index: Callable[[Index], Index], value: Callable[[Expr], Expr]) -> Accumulate:
        return Accumulate(self.name, self.reducer, value(self.value), index(self.index))

    def __str__(self) -> str:
        return f"{self.name} = {self.reducer}({self.value})"


Statement = Store | Accumulate


@dataclass(frozen=True)
class Phase:
    """``before`` runs once per row, then ``inside`` for every column point of the row."""

    before: tuple[Store, ...]
    inside: tuple[Statement, ...]


@dataclass(frozen=True)
class LoopNest:
    """What a kernel computes, the same on every device.

    ``rows`` and ``columns`` are loop variables, outermost first. ``lane`` is the one whose neighbouring values are
    computed side by side, None for a single point: memory is cheapest along it. ``parameters`` and ``scratch`` are the
    dtypes of the pointer parameters and of the rows kept between phases. ``sizes`` are numbers each launch passes, in
    terms of which every extent and index is written. Where ``folded`` is above 1, the lane variable is the last row,
    and so many neighbouring values of it are one row: what they reduce is folded together.
    """

    rows: tuple[Var, ...]
    columns: tuple[Var, ...]
    lane: Var | None
    phases: tuple[Phase, ...]
    parameters: tuple[torch.dtype, ...]
    scratch: tuple[torch.dtype, ...]
    sizes: tuple[Size, ...] = ()
    folded: int = 1

    @property
    def statements(self) -> list[Statement]:
        return [statement for phase in self.phases for statement in (*phase.before, *phase.inside)]

    def __str__(self) -> str:
        folded = f" folded by {self.folded}" if self.folded > 1 else ""
        lines = [f"rows {loops_text(self.rows)} columns {loops_text(self.columns)} lane {self.lane}{folded}"]
        for phase in self.phases:
            lines += [f"  {statement}" for statement in phase.before]
            lines += [f"    {statement}" for statement in phase.inside]
        return "\n".join(lines)


@dataclass(frozen=True)
class CpuMapping:
    """How a nest, whose ``lane`` is the last variable of its list, runs on a CPU.

    ``lanes`` values of the lane variable fill vector registers. ``iterations`` run in parallel, at least ``grain`` of
    them on a thread; a grain of 0 runs the kernel serially (where sizes decide it at run time, 0 means 1). They are the
    points of ``rows[:parallel_rows]``, times ``blocks`` of ``block`` values each of the last variable that is not
    counted there: the lane, or ``tile``, along which operands run in memory that the lane crosses
    (:mod:`torchkiln.schedule.tiles`).
    """

    lanes: int
    tile: Var | None
    parallel_rows: int
    blocks: Extent
    block: int
    iterations: Extent
    grain: Extent

    def __str__(self) -> str:
        tile = f"tile {self.tile} " if self.tile else ""
        split = f"blocks {self.blocks} of {self.block} iterations {self.iterations} grain {self.grain}"
        return f"cpu {tile}lanes {self.lanes} {split}"


@dataclass(frozen=True)
class GpuMapping:
    """How a nest runs on a GPU.

    ``iterations`` are the points of all rows; where the lane variable is the last row, it counts in ``blocks`` of
    ``block``, which is ``lanes``: neighbouring values that a thread computes together and moves by one access. A block
    of threads has ``threads`` of them. Each iteration is that of ``row_threads`` neighbouring ones: of one thread, or
    of a power of two in one warp, or of the whole block. They take the lanes of a row in turns. With ``parts`` above 0
    each has so many turns, and keeps what it computed of them in registers from one phase to the next. Where the lane
    variable is a row, neighbouring threads have neighbouring iterations, and a power of two that are ``rows_per_block``
    apart share one: they take the values of a column in turns (:func:`torchkiln.schedule.gpu.shared_column`).

    Where a row has columns outside of the lanes, its threads may be ``groups``, each of which takes every so many-th
    value of :func:`torchkiln.schedule.gpu.shared_column`.

    A thread that shares nothing runs ``items`` iterations, ``rows_per_block`` apart.

    Loops over columns take ``steps`` of these turns at a time, so that their reads are under way together.

    ``values`` are the numbers of parameters that are numbers on the CPU: a launch passes their bytes as an i64.

    With a ``tile`` variable, the last row but for the lane, an iteration is a square of ``block`` values of each of the
    two, which a block of threads computes. What crosses the lanes is moved along ``tile``, through shared memory.
    """

    lanes: int
    threads: int
    row_threads: int
    parts: int
    parallel_rows: int
    blocks: Extent
    block: int
    iterations: Extent

    tile: Var | None = None
    steps: int = 1
    groups: int = 1
    items: int = 1
    values: tuple[int, ...] = ()

    @property
    def lane_threads(self) -> int:
        """Threads of a row that take its lanes in turns."""
        return self.row_threads // self.groups

    @property
    def rows_per_block(self) -> int:
        """Iterations of one block of threads at a time."""
        return self.threads // self.row_threads

    @property
    def grid(self) -> Extent:
        """Blocks of threads in a launch."""
        return ix.ceil_divide(self.iterations, self.rows_per_block * self.items)

    def __str__(self) -> str:
        turns = f"tile {self.tile} of {self.block}" if self.tile else f"parts {self.parts}" if self.parts else "rolled"
        return f"gpu lanes {self.lanes} threads {self.threads} row {self.row_threads} {turns} grid {self.grid}"


Mapping = CpuMapping | GpuMapping


@dataclass(frozen=True)
class Kernel:
    """One function to generate."""

    nest: LoopNest
    mapping: Mapping

    @property
    def may_fail(self) -> bool:
        """Whether there may be no memory for scratch rows and tiles: symbolic ones are allocated by each call."""
        return bool(self.nest.scratch or self.mapping.tile) and not isinstance(extent_product(self.nest.columns), int)

    def __str__(self) -> str:
        return f"{self.mapping} {self.nest}"
