"""Lanes of a short loop, filled with iterations of the loop around it.

Groups of 8 channels, windows of 8 elements: vectors of one such run would be mostly empty, and a sum over them would be
one chain of additions. Memory is accessed run by run (:mod:`torchkiln.codegen.llvm.accesses`).
(64 x 131,072 / n rows of n elements in wider memory, float32, one thread of a Zen 5, µs before and after: gelu by tanh
plus a row, n = 4 1474 and 720, 8 758 and 373, 16 686 and 339; sum of all rows, n = 8 112 and 83; bfloat16 with n = 4
padded by rows 581 and 212. Group norm of 8 x 64 x 56 x 56 with channels last, 8 groups: 650 and 540, bfloat16 670 and
400.)
"""

from __future__ import annotations

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import FlatLoad
from torchkiln.ir.index import Index, Var
from torchkiln.schedule.kernel import LoopNest, Store
from torchkiln.schedule.loops import change_variables

_SHORTEST = 4  # elements of a run
_LEAST_COST = 5  # of a value; less is done before the runs are put together


def fill_lanes(nest: LoopNest, most: int) -> LoopNest:
    """The nest with a lane variable of up to ``most`` values, where the lane is a short loop of runs in memory."""
    lane = nest.lane
    loops = nest.columns if nest.columns else nest.rows
    if lane is None or lane not in loops or len(loops) < 2:
        return nest
    outer, length = loops[-2], lane.extent
    if not isinstance(length, int) or not isinstance(outer.extent, int):
        return nest
    if length < _SHORTEST or length & (length - 1) or not all(_in_runs(i, outer, lane) for i in _offsets(nest)):
        return nest
    if not nest.columns and max(ex.cost(s.value) for s in nest.statements) < _LEAST_COST:
        return nest
    taken = max(k for k in (most >> n for n in range(most.bit_length())) if outer.extent % max(k // length, 1) == 0)
    taken //= length
    if taken < 2:
        return nest
    filled, around = Var(f"{outer.name}{lane.name}", taken * length), Var(f"{outer.name}o", outer.extent // taken)
    left = ix.of(around) * taken if around.extent != 1 else ix.ZERO
    mapping = {outer: left + ix.of(filled) // length, lane: ix.of(filled) % length}
    changed = (*loops[:-2], *((around,) if around.extent != 1 else ()), filled)
    rows, columns = (nest.rows, changed) if nest.columns else (changed, ())
    return change_variables(nest, mapping, rows, columns, filled)


def _offsets(nest: LoopNest) -> list[Index]:
    statements = nest.statements
    loads = [n.offset for n in ex.walk(tuple(s.value for s in statements)) if isinstance(n, FlatLoad)]
    return loads + [s.offset for s in statements if isinstance(s, Store)]


def _in_runs(offset: Index, outer: Var, lane: Var) -> bool:
    """Whether the lanes are side by side, or one element, and runs a constant number of elements apart."""
    return offset.coefficient(lane) in (0, 1) and isinstance(offset.coefficient(outer), int)
