"""Which variable of a kernel becomes vector lanes, and what that makes of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.index import Index, Var
from torchkiln.ir.program import Buffer, Loop


def choose_vector(
    rows: Sequence[Var], columns: Sequence[Var], members: Sequence[Loop], buffers: Mapping[str, Buffer]
) -> Var | None:
    """The variable to compute several values of at once: the one with the cheapest accesses.

    Stride 1 is a vector load, stride 0 a broadcast, anything else a gather, priced at ten.
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
                each = 2.0 if is_store else 0.1
            elif stride == 1:
                each = 1.0
            else:
                each = 16.0 if is_store else 10.0
            total += each if inner or not inside else each * 0.01
        # Short vectors waste lanes.
        return total * max(1.0, 16 / max(ix.hint_of(var.extent), 1))

    return min(candidates, key=price)


def _access_variables(member: Loop) -> set[Var]:
    found: set[Var] = set(member.value.variables)
    for subscript in member.store:
        found |= subscript.variables()
    return found


def scatters(
    rows: Sequence[Var], columns: Sequence[Var], members: Sequence[Loop], last: Loop, buffers: Mapping[str, Buffer]
) -> bool:
    """Whether ``last``, together with ``members``, would store element by element, though it need not by itself."""
    vector = choose_vector(rows, columns, [*members, last], buffers)
    if vector is None:
        return False
    offset = ix.flatten(last.store, buffers[last.target].strides)
    if offset.coefficient(vector) in (None, 0, 1):
        return False
    return any(offset.coefficient(var) == 1 for var in (*rows, *columns) if var is not vector)
