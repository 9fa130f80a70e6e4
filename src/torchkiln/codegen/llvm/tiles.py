"""Operands that lie across the lanes, in tiles: transposed in registers, through buffers in which they lie along them.

A buffer has the operand at every point of a block of the tile variable: for one vector of lanes or, in a kernel with
columns, for all columns. Whole tiles go through registers. The rest, and tiles that a guard cuts, are copied element by
element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.instructions import shuffle, vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import memory_type
from torchkiln.codegen.llvm.rows import RowWriter
from torchkiln.codegen.llvm.tile_buffers import FIRST, ROW, TiledOperand, through_buffers
from torchkiln.codegen.llvm.transpose import transposed
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, FlatLoad, KernelMemory, Op
from torchkiln.ir.index import Extent, Index, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import CpuMapping, Kernel, LoopNest, Store
from torchkiln.schedule.tiles import TiledLoad, compared_distance, tiled_accesses

# Both sides of what is transposed at once.
_SIDE = 16
# Elements of an incomplete tile below which it is copied one by one, which is less code.
_FEW = 64
# Bytes of a block of tiles up to which the next block is fetched ahead: both stay in the first cache. Its rows
# are as many streams, more than processors follow. (8 x 32 x 224 x 224 into bytes in channels-last memory, one thread
# of a Zen 4: 6.6 ms without, 5.0 with; 4 x 64 x 56 x 56 that is in no cache: 0.60 and 0.31. What is in a cache: within
# 2 %.)
_FETCHED_BYTES = 1 << 14


@dataclass(frozen=True)
class Span:
    """Values of a variable: whole tiles from ``start`` to ``whole``, then the rest to ``end``.

    ``rest`` is their number where there are some, None where only ``end`` tells.
    """

    start: str
    whole: str
    end: str
    rest: int | None

    def parts(self) -> Iterator[tuple[str, str, int | None]]:
        """First value, end, and values at a time (None: any number)."""
        if self.start != self.whole:
            yield self.start, self.whole, _SIDE
        if self.rest != 0:
            yield self.whole, self.end, self.rest


def with_buffers(kernel: Kernel) -> tuple[LoopNest, list[TiledOperand]]:
    """The nest with loads from buffers and stores into them, and what they hold."""
    nest, mapping = kernel.nest, kernel.mapping
    if not isinstance(mapping, CpuMapping) or mapping.tile is None:
        return nest, []
    accesses = tiled_accesses(nest, mapping.tile)
    return through_buffers(nest, accesses, _place(nest, mapping), _copies(nest, accesses.loads))


def _copies(nest: LoopNest, loads: Sequence[TiledLoad]) -> dict[Store, FlatLoad]:
    """Stores of what one of ``loads`` reads and nothing else needs: tiles of it need no buffer.

    (Transposing 2048 x 2048 float32, one thread of a Zen 5: 1.7 ms through a buffer, 1.2 without.)
    """
    lane, statements = nest.lane, nest.statements
    assert lane is not None
    free = {tiled.load for tiled in loads if tiled.guard is None and not nest.columns}
    read = {node.memory for node in ex.walk(tuple(s.value for s in statements)) if isinstance(node, FlatLoad)}
    found = {
        s: s.value
        for s in statements
        if isinstance(s, Store)
        and isinstance(s.value, FlatLoad)
        and s.value in free
        and s.offset.coefficient(lane) == 1
        and s.memory not in read
    }
    needed = set(ex.walk(tuple(s.value for s in statements if s not in found)))
    return {store: load for store, load in found.items() if load not in needed}


def _place(nest: LoopNest, mapping: CpuMapping) -> Index:
    """Where a point lies in a buffer."""
    assert nest.lane is not None
    if not nest.columns:
        return ix.of(ROW) * mapping.lanes + ix.of(nest.lane) - ix.of(FIRST)
    column = ix.flatten([ix.of(v) for v in nest.columns], ix.contiguous_strides([v.extent for v in nest.columns]))
    return column + ix.of(ROW) * extent_product(nest.columns) if mapping.tile in nest.rows else column


class Tiles(RowWriter):
    """Fills and empties the buffers of tiles."""

    def __init__(self, module: ModuleBuilder, kernel: Kernel) -> None:
        nest, self.operands = with_buffers(kernel)
        assert isinstance(kernel.mapping, CpuMapping)
        self.mapping = mapping = kernel.mapping
        super().__init__(module, nest, mapping.lanes)
        if mapping.tile is not None:
            self.unbound = {ROW, FIRST}
            self.levels |= {ROW: self.levels[mapping.tile], FIRST: self.levels[mapping.tile]}

    def _indices(self) -> list[Index]:
        return super()._indices() + [operand.offset for operand in self.operands]

    def _buffer_elements(self) -> Extent:
        """Of the buffer of one operand."""
        nest, mapping = self.nest, self.mapping
        if not nest.columns:
            return mapping.block * mapping.lanes
        return ix.product((extent_product(nest.columns), mapping.block if mapping.tile in nest.rows else 1))

    @contextmanager
    def _bound(self, row: str, first: str = "0") -> Iterator[None]:
        """Around what accesses buffers."""
        before, self.unbound = self.unbound, set()
        self.variables[ROW], self.variables[FIRST] = row, first
        yield
        self.unbound = before

    def _span(self, extent: Extent) -> Span:
        """All values of a variable."""
        if isinstance(extent, int):
            return Span("0", str(extent - extent % _SIDE), str(extent), extent % _SIDE)
        end = self._extent(extent)
        return Span("0", self.f.fresh(f"and i64 {end}, {-_SIDE}"), end, None)

    def _span_of_vector(self, position: str, active: int | str) -> Span:
        """The ``active`` lanes of a vector at ``position``."""
        f = self.f
        end = f.fresh(f"add i64 {position}, {active}")
        if isinstance(active, str):
            whole = f.fresh(f"add i64 {position}, {f.fresh(f'and i64 {active}, {-_SIDE}')}")
            return Span(position, whole, end, None)
        rest = active % _SIDE
        whole = position if active < _SIDE else end if rest == 0 else f.fresh(f"sub i64 {end}, {rest}")
        return Span(position, whole, end, rest)

    def _span_of_block(self, block: str) -> Span:
        """Those of a block of the tile variable."""
        f, tile, length = self.f, self.mapping.tile, self.mapping.block
        assert tile is not None
        start = f.fresh(f"mul i64 {block}, {length}")
        end = f.fresh(f"add i64 {start}, {length}")
        if ix.divides(length, tile.extent):
            return Span(start, end, end, 0)
        last = self._extent(tile.extent)
        past = f.fresh(f"icmp sgt i64 {end}, {last}")
        end = f.fresh(f"select i1 {past}, i64 {last}, i64 {end}")
        if ix.divides(_SIDE, tile.extent):
            return Span(start, end, end, 0)
        tiles = f.fresh(f"and i64 {f.fresh(f'sub i64 {end}, {start}')}, {-_SIDE}")
        whole = f.fresh(f"add i64 {start}, {tiles}")
        return Span(start, whole, end, tile.extent % _SIDE if isinstance(tile.extent, int) else None)

    # -- between memory and buffers ---------------------------------------------------------------------------------

    def _fill(self, rows: Span, lanes: Span) -> None:
        self._transfer([o for o in self.operands if not o.is_store], rows, lanes)

    def _empty(self, rows: Span, lanes: Span) -> None:
        self._transfer([o for o in self.operands if o.is_store], rows, lanes)

    def _transfer(self, operands: Sequence[TiledOperand], rows: Span, lanes: Span) -> None:
        """At these values of the tile variable and of the lane variable, and all of other columns."""
        others = [v for v in self.nest.columns if v not in (self.mapping.tile, self.nest.lane)]
        for operand in operands:
            self._transfer_columns(operand, others, rows, lanes)

    def _transfer_columns(self, operand: TiledOperand, others: Sequence[Var], rows: Span, lanes: Span) -> None:
        if others:
            with self._loop("0", self._extent(others[0].extent)) as position:
                self.variables[others[0]] = position
                self._transfer_columns(operand, others[1:], rows, lanes)
            return
        for top, bottom, height in rows.parts():
            for left, right, width in lanes.parts():
                area = (height or 0) * (width or 0)
                if area == _SIDE * _SIDE or (area >= _FEW and operand.guard is None):
                    assert height is not None
                    assert width is not None
                    with self._loop(top, bottom, height) as row, self._loop(left, right, width) as lane:
                        self._transfer_tile(operand, (row, height), (lane, width), rows.start)
                else:
                    self._transfer_elements(operand, (top, bottom), (left, right), rows.start)

    def _place_at(self, row: str, lane: str, start: str) -> None:
        """The variables of a point of the block that begins with row ``start``."""
        tile, vector = self.mapping.tile, self.nest.lane
        assert tile is not None
        assert vector is not None
        self.variables[tile], self.variables[vector] = row, lane
        self.variables[ROW] = row if start == "0" else self.f.fresh(f"sub nsw i64 {row}, {start}")

    def _transfer_elements(
        self, operand: TiledOperand, rows: tuple[str, str], lanes: tuple[str, str], start: str
    ) -> None:
        """One by one. Nothing is read where a guard does not hold."""
        f, type_, align = self.f, memory_type(operand.dtype), operand.dtype.itemsize
        with self._loop(*lanes) as lane, self._loop(*rows) as row:
            self._place_at(row, lane, start)
            self.guards = [] if operand.guard is None else [self._value(operand.guard)]
            place = self._address(operand.buffer, type_, operand.place)
            address = self._guarded_address(self._address(operand.memory, type_, operand.offset))
            source, target = (place, address) if operand.is_store else (address, place)
            element = f.fresh(f"load {type_}, ptr {source}, align {align}")
            f.emit(f"store {type_} {element}, ptr {target}, align {align}")
            self.guards = []

    def _transfer_tile(self, operand: TiledOperand, rows: tuple[str, int], lanes: tuple[str, int], start: str) -> None:
        """A tile, given by first values and numbers of values, as a whole if all of it may be accessed."""
        (row, height), (lane, width) = rows, lanes
        self._place_at(row, lane, start)
        if operand.guard is None:
            self._transpose(operand, height, width)
            return
        with self._scope():  # what is computed here holds for the first point of the tile alone
            holds, fails = self._decide(operand.guard, height, width)

        def cut() -> None:
            bottom, right = (self.f.fresh(f"add i64 {first}, {count}") for first, count in (rows, lanes))
            self._transfer_elements(operand, (row, bottom), (lane, right), start)

        def not_whole() -> None:
            self._if(self.f.fresh(f"xor i1 {fails}, true"), cut)

        self._if(holds, lambda: self._transpose(operand, height, width), not_whole)

    def _transpose(self, operand: TiledOperand, height: int, width: int) -> None:
        vector = self.nest.lane
        assert vector is not None
        assert self.mapping.tile is not None
        stride = operand.offset.coefficient(vector)
        pitch = operand.place.coefficient(ROW) or operand.place.coefficient(self.mapping.tile)
        assert stride is not None
        assert pitch is not None
        memory = self._lines(operand.memory, operand.offset, operand.dtype, stride, width)
        buffer = self._lines(operand.buffer, operand.place, operand.dtype, pitch, height)
        source, target = (buffer, memory) if operand.is_store else (memory, buffer)
        length, count = (width, height) if operand.is_store else (height, width)
        type_, align = memory_type(operand.dtype), operand.dtype.itemsize
        values = []
        for address in source:
            value = self.f.fresh(f"load {vector_type(type_, length)}, ptr {address}, align {align}")
            values.append(self._resized(value, type_, length, _SIDE))
        if not operand.is_store:
            self._fetch_ahead(operand, memory)
        columns = transposed(self.f, values + ["poison"] * (_SIDE - count), type_)
        for address, column in zip(target, columns[:length], strict=True):
            value = self._resized(column, type_, _SIDE, count)
            self.f.emit(f"store {vector_type(type_, count)} {value}, ptr {address}, align {align}")

    def _resized(self, value: str, type_: str, lanes: int, wanted: int) -> str:
        """The first lanes of a vector, or it with lanes of any value added."""
        if lanes == wanted:
            return value
        if wanted == 1:
            return self.f.fresh(f"extractelement <{lanes} x {type_}> {value}, i64 0")
        if lanes == 1:
            return self.f.fresh(f"insertelement <{wanted} x {type_}> poison, {type_} {value}, i64 0")
        return shuffle(self.f, type_, lanes, value, "poison", [min(k, lanes - 1) for k in range(wanted)])

    def _lines(self, memory: KernelMemory, offset: Index, dtype: torch.dtype, stride: Extent, count: int) -> list[str]:
        """Addresses from ``offset`` on, ``stride`` apart."""
        base, found = self._scalar_index(offset), []
        for number in range(count):
            step = self._extent(ix.product((number, stride)))
            place = base if number == 0 else self.f.fresh(f"add nsw i64 {base}, {step}")
            pointer = self.pointers[memory]
            found.append(self.f.fresh(f"getelementptr inbounds {memory_type(dtype)}, ptr {pointer}, i64 {place}"))
        return found

    def _fetch_ahead(self, operand: TiledOperand, addresses: Sequence[str]) -> None:
        """The same lanes of the next block."""
        vector, nbytes = self.nest.lane, self.mapping.block * operand.dtype.itemsize
        assert vector is not None
        if self.nest.columns or ix.hint_of(vector.extent) * nbytes > _FETCHED_BYTES:
            return
        self.module.declare("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        for address in addresses:
            following = self.f.fresh(f"getelementptr i8, ptr {address}, i64 {nbytes}")
            self.f.emit(f"call void @llvm.prefetch.p0(ptr {following}, i32 0, i32 3, i32 1)")

    # -- guards of whole tiles --------------------------------------------------------------------------------------

    def _joined(self, name: str, flags: Sequence[str]) -> str:
        first, *others = flags
        for flag in others:
            first = self.f.fresh(f"{name} i1 {first}, {flag}")
        return first

    def _decide(self, condition: Expr, height: int, width: int) -> tuple[str, str]:
        """Whether ``condition`` holds all over the tile, and whether it holds nowhere."""
        f, tile, vector = self.f, self.mapping.tile, self.nest.lane
        assert tile is not None
        assert vector is not None
        if condition.variables.isdisjoint((tile, vector)):
            value = self._value(condition).ref
            return value, f.fresh(f"xor i1 {value}, true")
        assert isinstance(condition, Op)
        distance = compared_distance(condition)
        if distance is None:
            decided = [self._decide(operand, height, width) for operand in condition.args]
            holds, fails = [d[0] for d in decided], [d[1] for d in decided]
            if condition.name == "logical_not":
                return fails[0], holds[0]
            both, either = ("and", "or") if condition.name == "logical_and" else ("or", "and")
            return self._joined(both, holds), self._joined(either, fails)
        here, down, right = self._scalar_index(distance), *(distance.coefficient(v) for v in (tile, vector))
        assert isinstance(down, int)
        assert isinstance(right, int)
        steps = (down * (height - 1), right * (width - 1))
        low = f.fresh(f"add nsw i64 {here}, {sum(min(s, 0) for s in steps)}")
        high = f.fresh(f"add nsw i64 {here}, {sum(max(s, 0) for s in steps)}")
        return self._compare_ends(condition.name, low, high)

    def _compare_ends(self, name: str, low: str, high: str) -> tuple[str, str]:
        """Whether a comparison with zero holds for all numbers from ``low`` to ``high``, and whether for none."""
        f = self.f
        if name in ("eq", "ne"):
            equal = self._joined("and", [f.fresh(f"icmp eq i64 {end}, 0") for end in (low, high)])
            differs = self._joined("or", [f.fresh(f"icmp sgt i64 {low}, 0"), f.fresh(f"icmp slt i64 {high}, 0")])
            return (equal, differs) if name == "eq" else (differs, equal)
        holds, fails = {"lt": ("slt", "sge"), "le": ("sle", "sgt"), "gt": ("sgt", "sle"), "ge": ("sge", "slt")}[name]
        hardest, easiest = (high, low) if name in ("lt", "le") else (low, high)
        return f.fresh(f"icmp {holds} i64 {hardest}, 0"), f.fresh(f"icmp {fails} i64 {easiest}, 0")
