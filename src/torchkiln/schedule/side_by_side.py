"""Small kernels that have nothing to do with each other run as one, where launching a kernel takes as long as it runs.

They iterate alike, over other memory of the same layout: the last sums of several gradients, the step of an optimizer
for parameters of one shape. Each thread computes a point of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torchkiln.actions import Actions
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr
from torchkiln.ir.index import Extent, Index, Var
from torchkiln.ir.program import Buffer, ExternCall, Loop
from torchkiln.schedule.decisions import nodes_of
from torchkiln.schedule.dependencies import reads, writes
from torchkiln.schedule.fusion import Unit
from torchkiln.schedule.group import FusedGroup
from torchkiln.schedule.limits import Limits

# Units before a group among which one like it is looked for: those of a few layers.
_LOOKED_AT = 64


def put_side_by_side(
    units: Sequence[Unit], buffers: Mapping[str, Buffer], limits: Limits, actions: Actions | None = None
) -> list[Unit]:
    """``units``, which are in order, with small groups computed where an earlier one of the same kind is."""
    found: list[Unit] = []
    for unit in units:
        place = _place(unit, found, buffers, limits) if isinstance(unit, FusedGroup) else None
        if place is None:
            found.append(unit)
            continue
        first = found[place]
        assert isinstance(first, FusedGroup)
        assert isinstance(unit, FusedGroup)
        if actions is not None and not actions.take("fusion", partial(_described, first, unit)):
            found.append(unit)
        else:
            found[place] = _together(first, unit)
    return found


def _described(first: FusedGroup, second: FusedGroup) -> tuple[str, str | None]:
    names = (", ".join(nodes_of(group.members)) for group in (second, first))
    return " beside ".join(names), second.members[0].origin.source


def _place(group: FusedGroup, units: Sequence[Unit], buffers: Mapping[str, Buffer], limits: Limits) -> int | None:
    """Of the unit that ``group`` may be computed with: nothing from there on touches what it writes or reads."""
    if not 0 < ix.hint_of(group.points) <= limits.side_by_side_points:
        return None
    calls, touched, written = 0, _touched(group), _written(group)
    for place in reversed(range(max(0, len(units) - _LOOKED_AT), len(units))):
        unit = units[place]
        calls += isinstance(unit, ExternCall)
        if not isinstance(unit, FusedGroup | ExternCall) or calls > limits.near_calls:
            return None  # what reads numbers binds sizes
        if isinstance(unit, ExternCall) and unit.binds:
            return None
        if not touched.isdisjoint(_written(unit)) or not written.isdisjoint(_touched(unit)):
            return None
        if isinstance(unit, FusedGroup) and _alike(unit, group, buffers, limits):
            return place
    return None


def _written(unit: FusedGroup | ExternCall) -> set[str]:
    return {member.target for member in unit.members} if isinstance(unit, FusedGroup) else writes(unit)


def _touched(unit: FusedGroup | ExternCall) -> frozenset[str] | set[str]:
    return unit.buffers if isinstance(unit, FusedGroup) else reads(unit) | writes(unit)


def _alike(first: FusedGroup, second: FusedGroup, buffers: Mapping[str, Buffer], limits: Limits) -> bool:
    """Whether both iterate over the same points and walk through memory in the same ways."""
    if len(first.buffers | second.buffers) > limits.side_by_side_buffers:
        return False
    if first.size + second.size > limits.kernel_nodes or _extents(first) != _extents(second):
        return False
    if {buffers[m.target].device for m in first.members} != {buffers[m.target].device for m in second.members}:
        return False
    return _walks(first.members, buffers) == _walks(_in_variables_of(first, second), buffers)


def _extents(group: FusedGroup) -> tuple[list[Extent], list[Extent]]:
    return [v.extent for v in group.rows], [v.extent for v in group.columns]


def _in_variables_of(first: FusedGroup, second: FusedGroup) -> list[Loop]:
    there, here = (*first.rows, *first.columns), (*second.rows, *second.columns)
    mapping: dict[Var, Index] = {own: ix.of(other) for own, other in zip(here, there, strict=True)}
    memo: dict[Expr, Expr] = {}

    def express(node: Expr) -> Expr:
        return ex.rewrite(node, lambda _: None, mapping, memo)

    return [
        replace(
            member,
            value=express(member.value),
            store=tuple(ix.substitute(subscript, mapping, express) for subscript in member.store),
        )
        for member in second.members
    ]


def _walks(members: Sequence[Loop], buffers: Mapping[str, Buffer]) -> set[tuple[str | None, Index]]:
    """How members step through memory, whichever it is."""
    found = set()
    for member in members:
        found.add((member.reducer, ix.flatten(member.store, buffers[member.target].strides)))
        for load in ex.loads(member.value):
            found.add((None, ix.flatten(load.subscripts, buffers[load.buffer].strides)))
    return found


def _together(first: FusedGroup, second: FusedGroup) -> FusedGroup:
    members = (*first.members, *_in_variables_of(first, second))
    return replace(first, members=members, buffers=first.buffers | second.buffers, size=first.size + second.size)
