"""A nest whose loads and stores across the lanes go through buffers of tiles: what both devices make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir.expr import Expr, FlatLoad, KernelMemory, TileBuffer
from torchkiln.ir.index import Index, Var
from torchkiln.schedule.kernel import LoopNest, Phase, Statement, Store
from torchkiln.schedule.tiles import TiledAccesses

# Within a block: the number of the row, and the first value of the lane variable.
ROW, FIRST = Var("row", 1 << 16), Var("first", 1 << 62)


@dataclass(frozen=True)
class TiledOperand:
    """Memory at ``offset``, and where it lies along the lanes: at ``place`` of ``buffer``.

    That is a result of the kernel where the operand is only copied.
    """

    memory: KernelMemory
    offset: Index
    dtype: torch.dtype
    guard: Expr | None
    is_store: bool
    buffer: KernelMemory
    place: Index


def through_buffers(
    nest: LoopNest, accesses: TiledAccesses, place: Index, copies: Mapping[Store, FlatLoad]
) -> tuple[LoopNest, list[TiledOperand]]:
    """The nest with loads from buffers and stores into them, and what they hold: each point lies at ``place``.

    ``copies`` are stores of loads that need no buffer, and are no statements of the nest any more.
    """
    operands: list[TiledOperand] = []
    for store, load in copies.items():
        operands.append(TiledOperand(load.memory, load.offset, load.dtype, None, False, store.memory, store.offset))
    loads: dict[Expr, Expr] = {}
    for tiled in accesses.loads:
        load, buffer = tiled.load, TileBuffer(len(operands))
        if load not in copies.values():
            operands.append(TiledOperand(load.memory, load.offset, load.dtype, tiled.guard, False, buffer, place))
            loads[load] = FlatLoad(buffer, place, load.dtype)
    stores: dict[Store, TileBuffer] = {}
    for store in accesses.stores:
        stores[store] = buffer = TileBuffer(len(operands))
        operands.append(TiledOperand(store.memory, store.offset, store.value.dtype, None, True, buffer, place))

    def value(node: Expr) -> Expr:
        return ex.rewrite(node, lambda _: None, {}, loads)

    def rewritten(statement: Statement) -> Statement:
        if isinstance(statement, Store) and statement in stores:
            return Store(stores[statement], place, value(statement.value))
        return statement.mapped(lambda index: index, value)

    def stores_of(statements: Sequence[Store]) -> tuple[Store, ...]:
        return tuple(s for s in map(rewritten, statements) if isinstance(s, Store))

    phases = tuple(
        Phase(stores_of(p.before), tuple(rewritten(s) for s in p.inside if s not in copies)) for p in nest.phases
    )
    return replace(nest, phases=phases), operands
