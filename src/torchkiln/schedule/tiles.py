"""Operands that lie across the lanes: which of them go through tiles, along which variable.

Such an operand runs along another variable, the *tile* variable, in memory. Square tiles of it are transposed in
registers and pass through a buffer in which its elements lie along the lanes. Accessed one by one they would cost a
cache line each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, FlatLoad, IndexValue, KernelMemory, Masked, Op, Reduced
from torchkiln.ir.index import Index, Var
from torchkiln.ir.ops import COMPARISONS
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import LoopNest, Statement, Store
from torchkiln.schedule.limits import Limits


@dataclass(frozen=True)
class TiledLoad:
    """A load through tiles, which may read memory where ``guard`` holds, everywhere if there is none."""

    load: FlatLoad
    guard: Expr | None


@dataclass(frozen=True)
class TiledAccesses:
    """What a nest reads and writes through tiles."""

    loads: tuple[TiledLoad, ...]
    stores: tuple[Store, ...]

    def itemsizes(self) -> list[int]:
        """Bytes of an element of each operand."""
        return [t.load.dtype.itemsize for t in self.loads] + [s.value.dtype.itemsize for s in self.stores]


def choose_tile(nest: LoopNest, limits: Limits) -> Var | None:
    """The variable along which most of the operands that cross the lanes run in memory, if there is one."""
    lane = nest.lane
    if lane is None or (nest.columns and lane in nest.rows):
        return None
    long = [v for v in (*nest.rows, *nest.columns) if v is not lane and ix.hint_of(v.extent) >= limits.tile]
    votes: Counter[Var] = Counter()
    for var in long:
        accesses = tiled_accesses(nest, var)
        if _fits(nest, var, accesses.itemsizes(), limits):
            votes[var] = len(accesses.loads) + len(accesses.stores)
    best = max(votes, key=votes.__getitem__, default=None)
    return best if best is not None and votes[best] else None


def _fits(nest: LoopNest, tile: Var, itemsizes: Sequence[int], limits: Limits) -> bool:
    row = ix.hint_of(extent_product(nest.columns)) * sum(dtype.itemsize for dtype in nest.scratch)
    tiles = buffer_bytes(itemsizes, nest.columns, in_rows=tile in nest.rows, limits=limits)
    return row + tiles <= limits.scratch_bytes


def buffer_bytes(itemsizes: Collection[int], columns: Sequence[Var], *, in_rows: bool, limits: Limits) -> int:
    """Of the buffers for operands with elements of these bytes, 0 for next to nothing.

    A kernel with columns keeps all columns of its operands: of a row, or of a block with the tile variable ``in_rows``.
    """
    if not columns:
        return 0
    rows = block_of(itemsizes, limits) if in_rows else 1
    return ix.hint_of(extent_product(columns)) * rows * sum(itemsizes)


def block_of(itemsizes: Iterable[int], limits: Limits) -> int:
    """How many values of the tile variable a block has: whole cache lines of every operand, and whole tiles."""
    return max(limits.tile, limits.line_bytes // min(itemsizes, default=limits.line_bytes))


def tiled_accesses(nest: LoopNest, tile: Var) -> TiledAccesses:
    """The loads and stores that run along ``tile`` in memory and across the lanes."""
    lane = nest.lane
    assert lane is not None
    statements = nest.statements
    written = {s.memory for s in statements if isinstance(s, Store)}
    guards = _guards_of_loads(statements)
    loads = []
    for load, ways in guards.items():
        # In a kernel with columns, memory that is also written may hold what an earlier phase put there.
        if not _crosses(load.offset, tile, lane) or (nest.columns and load.memory in written):
            continue
        if _computed_here(load.offset, written):
            continue
        if () in ways:
            loads.append(TiledLoad(load, None))
        elif not ex.index_operands(load.offset) and all(is_decided(c, tile, lane) for way in ways for c in way):
            loads.append(TiledLoad(load, _any([_all(way) for way in ways])))
    read = {load.memory for load in guards}
    stores = [s for s in statements if isinstance(s, Store) and _crosses(s.offset, tile, lane)]
    stores = [s for s in stores if not _computed_here(s.offset, written)]
    if nest.columns:
        stores = [s for s in stores if s.memory not in read]
    return TiledAccesses(tuple(loads), tuple(stores))


def _computed_here(offset: Index, written: Collection[KernelMemory]) -> bool:
    """Whether an index comes from what the kernel itself computes, which is not there when a tile is moved."""
    nodes = ex.walk(tuple(ex.index_operands(offset)))
    return any(isinstance(n, Reduced) or (isinstance(n, FlatLoad) and n.memory in written) for n in nodes)


_all = partial(reduce, partial(ex.op, "logical_and"))
_any = partial(reduce, partial(ex.op, "logical_or"))


def _crosses(offset: Index, tile: Var, lane: Var) -> bool:
    return offset.coefficient(tile) == 1 and offset.coefficient(lane) not in (None, 0, 1)


def _guards_of_loads(statements: Iterable[Statement]) -> dict[FlatLoad, list[tuple[Expr, ...]]]:
    """Every load with the guards of each way that leads to it."""
    found: dict[FlatLoad, list[tuple[Expr, ...]]] = {}
    seen: set[tuple[Expr, tuple[Expr, ...]]] = set()
    stack: list[tuple[Expr, tuple[Expr, ...]]] = [(s.value, ()) for s in statements]
    while stack:
        node, guards = stack.pop()
        if (node, guards) in seen:
            continue
        seen.add((node, guards))
        if isinstance(node, FlatLoad):
            found.setdefault(node, []).append(guards)
        if isinstance(node, Masked):
            stack += [(node.condition, guards), (node.body, (*guards, node.condition))]
        else:
            stack.extend((operand, guards) for operand in node.operands)
    return found


def is_decided(condition: Expr, tile: Var, lane: Var) -> bool:
    """Whether the corners of a tile tell whether ``condition`` holds all over it, or nowhere."""
    if condition.variables.isdisjoint((tile, lane)):
        return not ex.reads_memory(condition) and not any(isinstance(n, Reduced) for n in ex.walk((condition,)))
    if not isinstance(condition, Op):
        return False
    if condition.name in LOGIC and condition.dtype == torch.bool:
        return all(a.dtype == torch.bool and is_decided(a, tile, lane) for a in condition.args)
    distance = compared_distance(condition)
    return distance is not None and all(isinstance(distance.coefficient(v), int) for v in (tile, lane))


LOGIC = ("logical_and", "logical_or", "logical_not")


def compared_distance(condition: Op) -> Index | None:
    """What a comparison of indices compares with zero, None for other operations."""
    if condition.name not in COMPARISONS:
        return None
    sides = [_as_index(side) for side in condition.args]
    if sides[0] is None or sides[1] is None:
        return None
    return sides[0] - sides[1]


def _as_index(side: Expr) -> Index | None:
    if isinstance(side, IndexValue) and side.dtype == torch.int64 and not side.operands:
        return side.index
    if isinstance(side, Constant) and side.dtype == torch.int64:
        return ix.constant(int(side.value))
    return None
