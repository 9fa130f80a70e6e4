"""Along which variable of a kernel values are computed side by side, and what that makes of a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import FlatLoad, Interleaved
from torchkiln.ir.index import Index, Var
from torchkiln.ir.program import Buffer
from torchkiln.schedule.group import FusedGroup
from torchkiln.schedule.kernel import LoopNest, Store
from torchkiln.schedule.limits import Limits
from torchkiln.schedule.loops import moves_as_one
from torchkiln.schedule.tiles import buffer_bytes


@dataclass(frozen=True)
class _Access:
    """A load or store of memory. One that is ``inner`` happens at every column, others once for each row."""

    offset: Index
    itemsize: int
    is_store: bool
    inner: bool

    def price(self, var: Var, limits: Limits, *, tiled: bool = False) -> float:
        """With neighbouring values of ``var`` in the lanes: stride 1 is contiguous, stride 0 a broadcast.

        What crosses the lanes of a ``tiled`` kernel is transposed in registers.
        """
        stride = self.offset.coefficient(var)
        if stride == 1:
            return 1.0
        if stride == 0:
            return limits.same_store if self.is_store else limits.broadcast_load
        if stride == -1:
            return limits.reversed_access
        if not self.is_store and limits.picks_lanes(stride, self.itemsize):
            assert isinstance(stride, int)
            return limits.picked_load * abs(stride)
        if tiled and stride is not None:  # a computed index has no tiles
            return limits.tiled_store if self.is_store else limits.tiled_load
        far = stride is None or abs(ix.hint_of(stride)) * self.itemsize >= limits.cache_line
        return (limits.scatter if self.is_store else limits.gather) * (1.0 if far else limits.same_line)


def choose_lane(group: FusedGroup, buffers: Mapping[str, Buffer], limits: Limits) -> Var | None:
    """The variable to compute several values of at once: the one with the cheapest accesses."""
    accesses = list(_accesses(group, buffers))

    def price(var: Var) -> float:
        total, tiled = 0.0, _is_tiled(group, accesses, var, limits)
        for access in accesses:
            if access.inner or not group.columns:
                total += access.price(var, limits, tiled=tiled)
            elif var not in group.columns:
                total += access.price(var, limits) * 0.01
        return total * _wasted(var, limits)

    candidates = [v for v in (*group.columns[::-1], *group.rows[::-1]) if v.extent not in (0, 1)]
    return min(candidates, key=price, default=None)


def price_of_point(nest: LoopNest, limits: Limits, *, tiled: bool) -> float:
    """Of the accesses at a point of a nest that has a lane and no columns."""
    lane = nest.lane
    assert lane is not None
    loads = {node for node in ex.walk(tuple(s.value for s in nest.statements)) if isinstance(node, FlatLoad)}
    total = sum(_Access(n.offset, n.dtype.itemsize, False, True).price(lane, limits, tiled=tiled) for n in loads)
    for store in nest.statements:
        assert isinstance(store, Store)
        if isinstance(store.value, Interleaved):
            total += limits.interleaved_store * len(store.value.parts)
        else:
            total += _Access(store.offset, store.value.dtype.itemsize, True, True).price(lane, limits, tiled=tiled)
    return total * _wasted(lane, limits)


def _wasted(lane: Var, limits: Limits) -> float:
    """How much more a vector costs whose lanes a short variable does not fill."""
    return max(1.0, limits.full_lanes / max(ix.hint_of(lane.extent), 1))


def _is_tiled(group: FusedGroup, accesses: Sequence[_Access], lane: Var, limits: Limits) -> bool:
    """Whether all that crosses ``lane`` runs along one other variable, so that tiles of it are transposed.

    What :mod:`torchkiln.schedule.tiles` declines for its guards is not told apart.
    """
    if group.columns and lane in group.rows:
        return False
    length = ix.hint_of(lane.extent) if group.columns else _length(group, accesses, lane)
    crossing = {a.offset: a.itemsize for a in accesses if a.offset.coefficient(lane) not in (None, 0, 1)}
    if length < limits.tile or not crossing:
        return False
    for var in (*group.rows, *group.columns):
        if var is not lane and ix.hint_of(var.extent) >= limits.tile:
            kept = buffer_bytes(crossing.values(), group.columns, in_rows=var in group.rows, limits=limits)
            if kept <= limits.scratch_bytes and all(offset.coefficient(var) == 1 for offset in crossing):
                return True
    return False


def _length(group: FusedGroup, accesses: Sequence[_Access], lane: Var) -> int:
    """Of ``lane``, or with a row that :func:`torchkiln.schedule.loops.fill_tiles` may add to it."""
    rows = (v for v in group.rows if v is not lane and all(moves_as_one(a.offset, v, lane) for a in accesses))
    return ix.hint_of(lane.extent) * max((ix.hint_of(row.extent) for row in rows), default=1)


def _accesses(group: FusedGroup, buffers: Mapping[str, Buffer]) -> Iterator[_Access]:
    for member in group.members:
        variables = member.value.variables.union(*(subscript.variables() for subscript in member.store))
        reduces = member.reducer is not None
        inner = reduces or not variables.isdisjoint(group.columns)
        target = buffers[member.target]
        store = ix.flatten(member.store, target.strides)
        yield _Access(store, target.dtype.itemsize, is_store=True, inner=inner and not reduces)
        for load in ex.loads(member.value):
            offset = ix.flatten(load.subscripts, buffers[load.buffer].strides)
            yield _Access(offset, load.dtype.itemsize, is_store=False, inner=inner)


def scatters(group: FusedGroup, buffers: Mapping[str, Buffer], limits: Limits) -> bool:
    """Whether the last member would store element by element, though it need not by itself."""
    lane = choose_lane(group, buffers, limits)
    last = group.members[-1]
    offset = ix.flatten(last.store, buffers[last.target].strides)
    if lane is None or offset.coefficient(lane) in (None, -1, 0, 1):
        return False
    return any(offset.coefficient(var) == 1 for var in (*group.rows, *group.columns) if var is not lane)
