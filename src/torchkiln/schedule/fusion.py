"""Fusion: which loops run as one kernel, over one iteration space.

A group iterates over ``rows`` and, where it holds a reduction, over ``columns`` within each row. Every member is
expressed in those variables. A loop is fused into a group when it touches the same memory at the same points: the link
is a buffer both access, and matching the two offsets gives the change of variables between the two spaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torchkiln.actions import Actions
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr
from torchkiln.ir.index import Extent, Index, Size, Var
from torchkiln.ir.program import Buffer, CheckFits, CheckSizes, ExternCall, Loop, Operation, Program, ReadNumber
from torchkiln.schedule.decisions import FusionDecision, nodes_of
from torchkiln.schedule.dependencies import (
    extent_product,
    iteration_points,
    pinned_buffers,
    predecessors,
    reads,
    writes,
)
from torchkiln.schedule.group import FusedGroup
from torchkiln.schedule.lanes import scatters
from torchkiln.schedule.limits import Limits

_NO_COMMON_ORDER = "they visit no common buffer in the same order"
_OTHER_POINT = "one touches what the other writes at another point, or they share no memory"

Unit = FusedGroup | ExternCall | ReadNumber | CheckSizes | CheckFits


def fuse(program: Program, limits: Limits, *, enabled: bool = True, actions: Actions | None = None) -> list[Unit]:
    """Group the loops of ``program``; the result is in an order that respects every dependency. ``actions`` counts."""
    fusion = _Fusion(program, limits)
    for position, operation in enumerate(program.operations):
        fused: tuple[int, FusedGroup] | None = None
        refused: list[tuple[int, str]] = []
        if isinstance(operation, Loop) and enabled:
            fused, refused = fusion.fused_unit(position, operation)
        if fused is not None and actions is not None and not actions.take("fusion", partial(_described, *fused)):
            refused.append((fused[0], "a limit on fusions"))
            fused = None
        if actions is not None and isinstance(operation, Loop):
            actions.watch("fusions", partial(_decisions, fusion.units, operation, fused, refused))
        fusion.add(position, operation, fused)
    return _ordered(fusion.units, fusion.before, fusion.unit_of)


def _described(_unit: int, group: FusedGroup) -> tuple[str, str | None]:
    *others, added = group.members
    nodes = dict.fromkeys(name for member in others for name in member.origin.nodes)
    return f"{', '.join(added.origin.nodes)} into the kernel of {', '.join(nodes)}", added.origin.source


def _decisions(
    units: Sequence[Unit], loop: Loop, fused: tuple[int, FusedGroup] | None, refused: Sequence[tuple[int, str]]
) -> list[FusionDecision]:
    """What was decided about ``loop`` and each unit it was tried with."""
    found = [FusionDecision("fuse", _nodes(units[unit]), loop.origin.nodes, False, reason) for unit, reason in refused]
    if fused is not None:
        found.append(FusionDecision("fuse", _nodes(units[fused[0]]), loop.origin.nodes, True))
    return found


def _nodes(unit: Unit) -> tuple[str, ...]:
    return nodes_of(unit.members) if isinstance(unit, FusedGroup) else unit.origin.nodes


class _Fusion:
    """Units while operations are added one after the other; a unit's number is its index in ``units``."""

    def __init__(self, program: Program, limits: Limits) -> None:
        self._program, self._limits = program, limits
        self._pinned = pinned_buffers(program)
        self.before = predecessors(program.operations)
        self.units: list[Unit] = []
        self.unit_of: list[int] = []  # per operation
        self._ancestors: list[int] = []  # per unit, a bit for each unit that must run before
        self._touching: dict[str, list[int]] = {}  # buffer -> units that access it, latest last
        self._calls = 0
        self._calls_before: list[int] = []  # per unit, library calls up to its first operation

    def fused_unit(self, position: int, loop: Loop) -> tuple[tuple[int, FusedGroup] | None, list[tuple[int, str]]]:
        """The unit that ``loop``, the operation at ``position``, is fused into, and that unit with it.

        Then the units that were tried before, and why ``loop`` is not fused into each.
        """
        refused: list[tuple[int, str]] = []
        for unit in self._candidates(loop, self.before[position]):
            fused = self._fused(unit, loop, self.before[position])
            if isinstance(fused, FusedGroup):
                return (unit, fused), refused
            refused.append((unit, fused))
        return None, refused

    def _fused(self, unit: int, loop: Loop, before: set[int]) -> FusedGroup | str:
        """The unit with ``loop``, or why not."""
        group, buffers = self.units[unit], self._program.buffers
        if not isinstance(group, FusedGroup):
            return "a library call, not a kernel" if isinstance(group, ExternCall) else "a check, not a kernel"
        if buffers[group.members[0].target].device != buffers[loop.target].device:
            return "they run on different devices"
        if self._would_cycle(unit, before):
            return "something that the loop needs must run after the kernel"
        fused = _fuse_into(group, loop, buffers, self._limits)
        if isinstance(fused, FusedGroup) and loop.target in self._pinned and _scatters(fused, buffers, self._limits):
            return "it would store an output across the lanes of the kernel's rows"
        return fused

    def add(self, position: int, operation: Operation, fused: tuple[int, FusedGroup] | None) -> None:
        """Add an operation to the unit it is fused into, or as a new one."""
        self._calls += isinstance(operation, ExternCall)
        needed = 0
        for p in self.before[position]:
            needed |= (1 << self.unit_of[p]) | self._ancestors[self.unit_of[p]]
        if fused is None:
            unit = len(self.units)
            self.units.append(
                _extended(FusedGroup(operation.ranges, operation.reduced, ()), operation, operation)
                if isinstance(operation, Loop)
                else operation
            )
            self._ancestors.append(needed)
            self._calls_before.append(self._calls)
        else:
            unit, self.units[unit] = fused
            self._add_ancestors(unit, needed)
        self.unit_of.append(unit)
        for name in _accessed(operation):
            seen = self._touching.setdefault(name, [])
            if not seen or seen[-1] != unit:
                seen.append(unit)

    def _candidates(self, loop: Loop, before: set[int]) -> list[int]:
        """Units worth trying: producers first, then the latest units that touch the same memory."""
        latest = {unit for name in _accessed(loop) for unit in self._touching.get(name, ())[-3:]}
        near = {unit for unit in latest if self._calls - self._calls_before[unit] <= self._limits.near_calls}
        producers = sorted({self.unit_of[p] for p in before}, reverse=True)
        return producers + sorted(near.difference(producers), reverse=True)[:6]

    def _would_cycle(self, unit: int, before: set[int]) -> bool:
        """Whether something the loop needs must itself run after the unit."""
        bit = 1 << unit
        return any(self.unit_of[p] != unit and self._ancestors[self.unit_of[p]] & bit for p in before)

    def _add_ancestors(self, unit: int, needed: int) -> None:
        bit = 1 << unit
        added = needed & ~bit & ~self._ancestors[unit]
        if added:
            self._ancestors[unit] |= added
            self._ancestors = [a | added if a & bit else a for a in self._ancestors]


def _accessed(operation: Operation) -> set[str]:
    return reads(operation) | writes(operation)


def _extended(group: FusedGroup, loop: Loop, member: Loop) -> FusedGroup:
    """``group`` with ``loop``, which is ``member`` in the variables of the group."""
    buffers, size = group.buffers | _accessed(loop), group.size + loop.value.size
    return replace(group, members=(*group.members, member), buffers=buffers, size=size)


def _ordered(units: Sequence[Unit], before: Sequence[set[int]], unit_of: Sequence[int]) -> list[Unit]:
    """Units in dependency order, as near to that of the program as fusion leaves it.

    A unit runs when the operation that completes it did, or earlier where something earlier needs it. Without the
    second, what waits for a unit that is completed late is overtaken by all that does not, whose results then lie in
    memory for long: in a backward that recomputes several stretches of forward, those of all stretches at once.
    """
    needs: list[set[int]] = [set() for _ in units]
    followers: list[set[int]] = [set() for _ in units]
    due: list[int] = [0] * len(units)
    for position, unit in enumerate(unit_of):
        due[unit] = position
        for p in before[position]:
            if unit_of[p] != unit:
                needs[unit].add(unit_of[p])
                followers[unit_of[p]].add(unit)
    for unit in reversed(_by_due_time(due, needs, followers)):
        due[unit] = min((due[unit], *(due[follower] for follower in followers[unit])))
    return [units[unit] for unit in _by_due_time(due, needs, followers)]


def _by_due_time(due: Sequence[int], needs: Sequence[set[int]], followers: Sequence[set[int]]) -> list[int]:
    """Units in dependency order; among those that may run, the one that is due first."""
    waiting = [len(n) for n in needs]
    ready = [(due[u], u) for u in range(len(due)) if not waiting[u]]
    heapq.heapify(ready)
    result: list[int] = []
    while ready:
        _, unit = heapq.heappop(ready)
        result.append(unit)
        for follower in followers[unit]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (due[follower], follower))
    assert len(result) == len(due), "fusion made a cycle"
    return result


def _fuse_into(group: FusedGroup, loop: Loop, buffers: Mapping[str, Buffer], limits: Limits) -> FusedGroup | str:
    """``group`` with ``loop`` added, or why they are not one kernel."""
    if len(group.buffers | _accessed(loop)) > limits.kernel_buffers:
        return f"together they touch more than {limits.kernel_buffers} buffers"
    if group.size + loop.value.size > limits.kernel_nodes:
        return f"together they compute more than {limits.kernel_nodes} operations at a point"
    if group.points == 0 or iteration_points(loop) == 0:
        return "there is nothing to compute"
    if not _sizes_fit(group, loop):
        return "they iterate over different numbers of points"
    if loop.reducer is not None and not group.columns:
        return _become_rows(group, loop, buffers, limits)
    own, space = (*loop.ranges, *loop.reduced), (*group.rows, *group.columns)
    mapping = _map_space(own, _accesses(loop), space, _group_accesses(group), buffers, group.rows)
    if mapping is None:
        return _NO_COMMON_ORDER
    member = _express(loop, mapping)
    if not _level_matches(group, loop, mapping):
        return "they reduce over different dimensions"
    if not _agrees(group, member):
        return _OTHER_POINT
    alone = bool(group.columns) and _too_few_rows(group.row_count, group.points, limits) and loop.reducer is None
    if alone and ix.hint_of(extent_product(loop.ranges)) > ix.hint_of(group.row_count):
        return "too few rows for the threads: the larger loop runs faster by itself"
    return _extended(group, loop, member)


def _scatters(group: FusedGroup, buffers: Mapping[str, Buffer], limits: Limits) -> bool:
    """Whether the last member is pointwise and its store lies across the lanes of the others' rows."""
    if not group.columns or group.members[-1].reducer or ix.hint_of(group.points) < limits.tiled_points:
        return False
    return scatters(group, buffers, limits)


def _sizes_fit(group: FusedGroup, loop: Loop) -> bool:
    """The cheap necessary condition: the numbers of points match."""
    results, points = extent_product(loop.ranges), iteration_points(loop)
    if loop.reducer is None:
        return points in (group.points, group.row_count)
    if group.columns:
        return points == group.points and results == group.row_count
    return group.points in (points, results)


def _too_few_rows(rows: Extent, points: Extent, limits: Limits) -> bool:
    return ix.hint_of(rows) < limits.few_rows and ix.hint_of(points) >= limits.few_rows_points


def _become_rows(group: FusedGroup, loop: Loop, buffers: Mapping[str, Buffer], limits: Limits) -> FusedGroup | str:
    """A pointwise group takes on the rows and columns of a reduction that reads it."""
    if _too_few_rows(extent_product(loop.ranges), iteration_points(loop), limits):
        return "the reduction has too few rows for the threads: the pointwise kernel runs faster by itself"
    if any(m.reducer for m in group.members):
        return "a reduction over no dimension, which columns would compute many times"
    if _overwrites(group):
        return "a later phase could look for the old value in memory that is new by then"
    space = (*loop.ranges, *loop.reduced)
    mapping = _map_space(group.rows, _group_accesses(group), space, _accesses(loop), buffers, loop.ranges)
    if mapping is None:
        return _NO_COMMON_ORDER
    members = tuple(_express(m, mapping) for m in group.members)
    group = replace(group, rows=loop.ranges, columns=loop.reduced, members=members)
    return _extended(group, loop, loop) if _agrees(group, loop) else _OTHER_POINT


def _overwrites(group: FusedGroup) -> bool:
    """Whether a member writes memory whose old value it or an earlier member reads."""
    read: set[str] = set()
    for member in group.members:
        read.update(load.buffer for load in ex.loads(member.value))
        if member.target in read:
            return True
    return False


def _express(loop: Loop, mapping: Mapping[Var, Index]) -> Loop:
    """``loop`` in other variables."""
    memo: dict[Expr, Expr] = {}

    def express(node: Expr) -> Expr:
        return ex.rewrite(node, lambda _: None, mapping, memo)

    value = express(loop.value)
    store = tuple(ix.substitute(s, mapping, express) for s in loop.store)
    return replace(loop, value=value, store=store, ranges=(), reduced=())


Access = tuple[str, tuple[Index, ...]]


def _accesses(loop: Loop) -> list[Access]:
    return [(load.buffer, load.subscripts) for load in ex.loads(loop.value)] + [(loop.target, loop.store)]


def _group_accesses(group: FusedGroup) -> list[Access]:
    found = [(m.target, m.store) for m in group.members]
    for member in group.members:
        found.extend((load.buffer, load.subscripts) for load in ex.loads(member.value))
    return found


def _map_space(
    own: Sequence[Var],
    own_accesses: Sequence[Access],
    target: Sequence[Var],
    target_accesses: Sequence[Access],
    buffers: Mapping[str, Buffer],
    target_rows: Sequence[Var],
) -> dict[Var, Index] | None:
    """Express variables ``own`` through ``target``, by a buffer that both visit point for point."""
    points = extent_product(own)
    spaces = [tuple(target)] if extent_product(target) == points else []
    if extent_product(target_rows) == points and tuple(target_rows) not in spaces:
        spaces.append(tuple(target_rows))
    by_buffer: dict[str, list[tuple[Index, ...]]] = {}
    for name, subscripts in target_accesses:
        by_buffer.setdefault(name, []).append(subscripts)
    for name, subscripts in own_accesses:
        for other in by_buffer.get(name, ()):
            strides = buffers[name].strides
            mapping = _map_by_offsets(own, ix.flatten(subscripts, strides), ix.flatten(other, strides), spaces)
            if mapping is not None:
                return mapping
    shared = {name for name, _ in own_accesses} & set(by_buffer)
    if not spaces or not shared:
        return None
    space = spaces[0]
    flat = ix.flatten([ix.of(v) for v in space], ix.contiguous_strides([v.extent for v in space]))
    return dict(zip(own, ix.unflatten(flat, [v.extent for v in own]), strict=True))


def _map_by_offsets(
    own: Sequence[Var], here: Index, there: Index, spaces: Sequence[tuple[Var, ...]]
) -> dict[Var, Index] | None:
    """Variables ``own``, by which ``here`` visits a buffer point for point, such that ``here`` is ``there``."""
    if here.const != there.const:
        # Neighbours of an element, as stencils and shifted halves read them, are no link: meeting them at their place
        # would shift the whole space by that distance.
        return None
    inverse = ix.dense_inverse(here, own)
    if inverse is None or all(ix.dense_inverse(there, space) is None for space in spaces):
        found = (_map_by_strides(own, here, there, space) for space in spaces)
        return next((mapping for mapping in found if mapping is not None), None)
    position = there - there.const
    return {v: (position // inverse[v][0]) % inverse[v][1] if v in inverse else ix.ZERO for v in own}


def _map_by_strides(own: Sequence[Var], here: Index, there: Index, space: Sequence[Var]) -> dict[Var, Index] | None:
    """Variables ``own`` as those of ``space`` that walk a buffer with gaps by the same stride, as often.

    (Softmax over the rows of every second column, 768 x 1024: two kernels before, one so, the maximum with the sum.)
    """
    if not all(isinstance(atom, Var | Size) for atom in here.atoms()):
        return None
    walked = {(there.coefficient(v), v.extent): v for v in space if ix.moves(v.extent)}
    moving = {v: (here.coefficient(v), v.extent) for v in own if ix.moves(v.extent)}
    if any(stride in (None, 0) for stride, _ in walked) or set(moving.values()) != set(walked):
        return None
    if len(moving) != len(walked) or len(walked) != sum(ix.moves(v.extent) for v in space):
        return None  # two variables with one stride could stand for each other
    mapping = {v: ix.of(walked[moving[v]]) if v in moving else ix.ZERO for v in own}
    return mapping if ix.substitute(here, mapping) == there else None


def _level_matches(group: FusedGroup, loop: Loop, mapping: Mapping[Var, Index]) -> bool:
    """A reduction's results must follow the rows alone and its reduced points the columns alone."""
    if loop.reducer is None:
        return True
    rows, columns = set(group.rows), set(group.columns)
    return all(mapping[v].variables() <= rows for v in loop.ranges) and all(
        mapping[v].variables() <= columns for v in loop.reduced
    )


def _agrees(group: FusedGroup, member: Loop) -> bool:
    """Whether every buffer written on one side and touched on the other is touched at the same point."""
    written = {m.target: m.store for m in group.members}
    shared = False
    for load in ex.loads(member.value):
        if load.buffer in written:
            if load.subscripts != written[load.buffer]:
                return False
            shared = True
        elif load.buffer in group.buffers:
            shared = True
    if member.target in group.buffers:
        if group.columns:
            return False  # another phase may still read the old value
        if any(name == member.target and place != member.store for name, place in _group_accesses(group)):
            return False
    # Memory written by a member and written again would need an order between the two stores.
    return shared and member.target not in written
