"""Lanes of short runs, filled with the rows beside them: what each lane reduces is folded over its run at the end.

Groups of 8 channels with channels last: a row takes 32 bytes of each pixel, and the next row those beside them. Row by
row every cache line is fetched twice in each phase; together, memory is read in order.
"""

from __future__ import annotations

from dataclasses import replace

from torchkiln.ir import index as ix
from torchkiln.ir.index import Index, Var
from torchkiln.ir.program import INDEX_REDUCERS
from torchkiln.schedule.cpu import most_lanes
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import Accumulate, LoopNest, Phase, Statement
from torchkiln.schedule.limits import Limits
from torchkiln.schedule.loops import change_variables, indices, moves_as_one


def fold_lanes(nest: LoopNest, vector_bits: int, limits: Limits) -> LoopNest:
    """The nest with lanes along its rows, where the lanes are runs of columns with rows beside them.

    As many rows stay apart as keep threads busy.
    """
    lane = nest.lane
    if lane is None or len(nest.columns) < 2 or lane not in nest.columns or nest.scratch:
        return nest
    length = lane.extent
    if not isinstance(length, int) or length & (length - 1) or length * _itemsize(nest) >= limits.cache_line:
        return nest
    if any(isinstance(s, Accumulate) and s.reducer in INDEX_REDUCERS for s in nest.statements):
        return nest
    nest = _without_places(nest)
    every = indices(nest)
    row = next((row for row in nest.rows if all(_beside(index, row, lane) for index in every)), None)
    if row is None or not isinstance(row.extent, int):
        return nest
    most = most_lanes(nest, vector_bits)
    others = ix.hint_of(extent_product([v for v in nest.rows if v is not row]))
    counts = (most // length >> k for k in range(most.bit_length()))
    fitting = (n for n in counts if n and row.extent % n == 0 and others * (row.extent // n) >= limits.few_rows)
    taken = next(fitting, 1)
    if taken < 2:
        return nest
    filled, around = Var(f"{row.name}{lane.name}", taken * length), Var(f"{row.name}o", row.extent // taken)
    left = ix.of(around) * taken if around.extent != 1 else ix.ZERO
    mapping = {row: left + ix.of(filled) // length, lane: ix.of(filled) % length}
    outer = [around if v is row else v for v in nest.rows if v is not row or around.extent != 1]
    columns = [v for v in nest.columns if v is not lane]
    together = replace(change_variables(nest, mapping, (*outer, filled), columns, filled), folded=length)
    # What was one value for a row is a vector now, and of many vectors each is shorter: less than a run, maybe.
    return together if most_lanes(together, vector_bits) >= length else nest


def _without_places(nest: LoopNest) -> LoopNest:
    """The nest without the places of points, which none of its reductions needs."""

    def without(statement: Statement) -> Statement:
        return replace(statement, index=ix.ZERO) if isinstance(statement, Accumulate) else statement

    phases = tuple(Phase(phase.before, tuple(map(without, phase.inside))) for phase in nest.phases)
    return replace(nest, phases=phases)


def _itemsize(nest: LoopNest) -> int:
    """Bytes of the widest elements in memory."""
    return max(dtype.itemsize for dtype in nest.parameters)


def _beside(index: Index, row: Var, lane: Var) -> bool:
    """Whether the lanes of the next row follow those of a row, or a row is one element to ``index``."""
    if index.coefficient(lane) == 0:
        return isinstance(index.coefficient(row), int)
    return index.coefficient(lane) == 1 and moves_as_one(index, row, lane)
