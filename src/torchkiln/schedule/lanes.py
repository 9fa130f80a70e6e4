"""Along which variable of a kernel values are computed side by side, and what that makes of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.index import Index, Var
from torchkiln.ir.program import Buffer, Loop
from torchkiln.schedule.limits import Limits


def choose_lane(
    rows: Sequence[Var],
    columns: Sequence[Var],
    members: Sequence[Loop],
    buffers: Mapping[str, Buffer],
    limits: Limits,
) -> Var | None:
    """The variable to compute several values of at once: the one with the cheapest accesses.

    Stride 1 is a contiguous access, stride 0 a broadcast, anything else a gather or scatter.
    """
    candidates = [v for v in (*columns[::-1], *rows[::-1]) if v.extent not in (0, 1)]
    if not candidates:
        return None
    accesses: list[tuple[Index, bool, bool]] = []
    inside = set(columns)
    for member in members:
        inner = member.reducer is not None or bool(inside & _access_variables(member))
        accesses.append(
            (ix.flatten(member.store, buffers[member.target].strides), True, inner and member.reducer is None)
        )
        for load in ex.loads(member.value):
            offset = ix.flatten(load.subscripts, buffers[load.buffer].strides)
            accesses.append((offset, False, inner))

    def price(var: Var) -> float:
        total = 0.0
        for offset, is_store, inner in accesses:
            if var in inside and not inner:
                continue
            stride = offset.coefficient(var)
            if stride == 0:
                each = limits.same_store if is_store else limits.broadcast_load
            elif stride == 1:
                each = 1.0
            else:
                each = limits.scatter if is_store else limits.gather
            total += each if inner or not inside else each * 0.01
        return total * max(1.0, limits.full_lanes / max(ix.hint_of(var.extent), 1))

    return min(candidates, key=price)


def _access_variables(member: Loop) -> set[Var]:
    found: set[Var] = set(member.value.variables)
    for subscript in member.store:
        found |= subscript.variables()
    return found


def scatters(
    rows: Sequence[Var],
    columns: Sequence[Var],
    members: Sequence[Loop],
    last: Loop,
    buffers: Mapping[str, Buffer],
    limits: Limits,
) -> bool:
    """Whether ``last``, together with ``members``, would store element by element, though it need not by itself."""
    lane = choose_lane(rows, columns, [*members, last], buffers, limits)
    if lane is None:
        return False
    offset = ix.flatten(last.store, buffers[last.target].strides)
    if offset.coefficient(lane) in (None, 0, 1):
        return False
    return any(offset.coefficient(var) == 1 for var in (*rows, *columns) if var is not lane)
