"""Kernels whose operands run along different variables in memory: squares of them are transposed in shared memory.

The threads of a warp move what crosses the lanes along the tile variable, neighbours in memory, and compute along the
lanes. A block has one square. Lines of a square in shared memory are an odd number of elements apart, so that the
threads of a warp find them in different banks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torchkiln.codegen.llvm.gpu.kernel import GpuWriter
from torchkiln.codegen.llvm.gpu.threads import barrier
from torchkiln.codegen.llvm.instructions import vector_type
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Value, memory_type
from torchkiln.codegen.llvm.tile_buffers import FIRST, ROW, TiledOperand, through_buffers
from torchkiln.ir import index as ix
from torchkiln.ir.expr import TileBuffer
from torchkiln.ir.index import Index, Var
from torchkiln.schedule.gpu import WARP, alignment_of, tile_pitch
from torchkiln.schedule.kernel import GpuMapping, Kernel, Store
from torchkiln.schedule.tiles import tiled_accesses

# Lines that a warp computes together where it has several, so that what they read is under way at one time; and the
# nodes of expressions above which code is not repeated for that.
_LINES, _REPEATED_NODES = 4, 64


class TileWriter(GpuWriter):
    """Writes the function of a kernel that has a tile variable."""

    def __init__(self, module: ModuleBuilder, kernel: Kernel, symbol: str) -> None:
        assert isinstance(kernel.mapping, GpuMapping)
        lane, tile = kernel.nest.lane, kernel.mapping.tile
        assert lane is not None
        assert tile is not None
        self.lane, self.tile, self.side = lane, tile, kernel.mapping.block
        place = (ix.of(lane) - ix.of(FIRST)) * tile_pitch(self.side) + ix.of(ROW)
        accesses = tiled_accesses(kernel.nest, tile)
        nest, self.operands = through_buffers(kernel.nest, accesses, place, {})
        super().__init__(module, replace(kernel, nest=nest), symbol)
        self.unbound = {ROW, FIRST}
        self.levels |= {ROW: self.levels[tile], FIRST: self.levels[tile]}

    def _indices(self) -> list[Index]:
        return super()._indices() + [operand.offset for operand in self.operands]

    def _iteration(self, iteration: str) -> None:
        f, mapping = self.f, self.mapping
        parallel = self.nest.rows[: mapping.parallel_rows]
        across = ix.ceil_divide(self.tile.extent, self.side)
        extents = [*(v.extent for v in parallel), across, mapping.blocks]
        *places, down, right = self._decoded(iteration, extents)
        self.variables.update(zip(parallel, places, strict=True))
        self._hoist(self.statements, {self.tile, self.lane})
        self._allocate()
        row, first = (f.fresh(f"mul nuw nsw i64 {number}, {self.side}") for number in (down, right))
        self.variables[FIRST] = first
        self.unbound = set()
        whole = [self._reaches(row, self.tile), self._reaches(first, self.lane)]
        conditions = [condition for condition in whole if condition is not None]
        inside = conditions[0] if conditions else None
        for condition in conditions[1:]:
            inside = f.fresh(f"and i1 {inside}, {condition}")
        loads, stores = ([o for o in self.operands if o.is_store == is_store] for is_store in (False, True))
        if loads:
            self._whole_or_cut(partial(self._move_all, loads, row, first), inside)
            barrier(f)
        self._whole_or_cut(partial(self._compute_square, row, first), inside)
        if stores:
            barrier(f)
            self._whole_or_cut(partial(self._move_all, stores, row, first), inside)

    def _whole_or_cut(self, step: Callable[[bool], None], inside: str | None) -> None:
        if inside is None:
            step(True)
        else:
            self._if(inside, partial(step, True), partial(step, False))

    def _reaches(self, first: str, variable: Var) -> str | None:
        """Whether ``variable`` has all values of a square that begins with ``first``; None where it always has."""
        if ix.divides(self.side, variable.extent):
            return None
        last = self.f.fresh(f"add nuw nsw i64 {first}, {self.side}")
        return self.f.fresh(f"icmp sle i64 {last}, {self._extent(variable.extent)}")

    def _allocate(self) -> None:
        for operand in self.operands:
            assert isinstance(operand.buffer, TileBuffer)
            array = f"@{self.symbol}_shared{operand.buffer.number}"
            type_ = f"[{self.side * tile_pitch(self.side)} x {memory_type(operand.dtype)}]"
            self.module.declare(f"{array} = internal addrspace(3) global {type_} undef, align 16")
            cast = f"addrspacecast ptr addrspace(3) {array} to ptr"
            self.pointers[operand.buffer] = self.f.fresh(cast)

    # -- between memory and shared memory -----------------------------------------------------------------------------

    def _move_all(self, operands: Sequence[TiledOperand], row: str, first: str, whole: bool) -> None:
        for operand in operands:
            self._move(operand, row, first, whole)

    def _move(self, operand: TiledOperand, row: str, first: str, whole: bool) -> None:
        """All of a square: a warp takes a line along the tile variable, several elements of it in each thread."""
        f, warps = self.f, self.mapping.threads // WARP
        each = self.side // WARP
        together = each if whole and self._moves_together(operand, each) else 1
        thread, warp = self._place_in_warp()
        moves: list[Callable[[], None]] = []
        for line in range(0, self.side, warps):
            column = self._plus(warp, line)
            for part in range(each // together):
                at = f.fresh(f"mul nuw nsw i64 {thread}, {together}") if together > 1 else thread
                moves.append(self._fetch(operand, (row, self._plus(at, WARP * part)), (first, column), together, whole))
        for write in moves:
            write()

    def _fetch(
        self, operand: TiledOperand, tile: tuple[str, str], lane: tuple[str, str], count: int, whole: bool
    ) -> Callable[[], None]:
        """Read elements along the tile variable; the result writes them to where they go."""
        f, element = self.f, memory_type(operand.dtype)
        itemsize = operand.dtype.itemsize
        with self._scope():
            self.variables[ROW] = tile[1]
            self.variables[self.tile], self.variables[self.lane] = (self._sum(*tile), self._sum(*lane))
            here = None if whole else self._exists()
            self.guards = [] if operand.guard is None else [self._value(operand.guard)]
            place = self._address(operand.buffer, element, operand.place)
            address = self._address(operand.memory, element, operand.offset)
            if operand.is_store:
                elements = [f.fresh(f"load {element}, ptr {self._next(place, element, k)}") for k in range(count)]
            elif count > 1:
                wide = vector_type(element, count)
                vector = f.fresh(f"load {wide}, ptr {address}, align {count * itemsize}")
                elements = [f.fresh(f"extractelement {wide} {vector}, i64 {k}") for k in range(count)]
            else:
                self.present = here
                elements = [self._load_scalar(element, address, itemsize)]
                self.present = None
            self.guards = []

        def write() -> None:
            if not operand.is_store:  # elements of the square that there are not are never asked for
                for k, value in enumerate(elements):
                    f.emit(f"store {element} {value}, ptr {self._next(place, element, k)}, align {itemsize}")
                return
            wide, value = vector_type(element, count), elements[0]
            if count > 1:
                value = "poison"
                for k, one in enumerate(elements):
                    value = f.fresh(f"insertelement {wide} {value}, {element} {one}, i64 {k}")
            text = f"store {wide} {value}, ptr {address}, align {count * itemsize}"
            if here is None:
                f.emit(text)
            else:
                self._if(here, partial(f.emit, text))

        return write

    def _moves_together(self, operand: TiledOperand, count: int) -> bool:
        """Whether an access takes ``count`` neighbours along the tile variable."""
        if operand.guard is not None or count == 1:
            return False
        itemsize = operand.dtype.itemsize
        return alignment_of(operand.offset, itemsize, count, self.tile) >= count * itemsize

    def _exists(self) -> str:
        """Whether there is such a value of both variables."""
        f = self.f
        flags = [
            f.fresh(f"icmp slt i64 {self.variables[v]}, {self._extent(v.extent)}") for v in (self.tile, self.lane)
        ]
        return f.fresh(f"and i1 {flags[0]}, {flags[1]}")

    def _place_in_warp(self) -> tuple[str, str]:
        """The number of this thread in its warp, and of the warp in its block."""
        f = self.f
        thread, warp = f.fresh(f"and i32 {self.thread}, {WARP - 1}"), f.fresh(f"lshr i32 {self.thread}, 5")
        return f.fresh(f"zext i32 {thread} to i64"), f.fresh(f"zext i32 {warp} to i64")

    def _plus(self, value: str, number: int) -> str:
        return self.f.fresh(f"add nuw nsw i64 {value}, {number}") if number else value

    def _sum(self, start: str, value: str) -> str:
        return self.f.fresh(f"add nuw nsw i64 {start}, {value}")

    def _next(self, address: str, element: str, number: int) -> str:
        return self.f.fresh(f"getelementptr {element}, ptr {address}, i64 {number}") if number else address

    # -- what the kernel computes -------------------------------------------------------------------------------------

    def _compute_square(self, row: str, first: str, whole: bool) -> None:
        """Lines along the lanes, a warp for each."""
        f, lanes, warps = self.f, self.mapping.lanes, self.mapping.threads // WARP
        thread, warp = self._place_in_warp()
        at = f.fresh(f"mul nuw nsw i64 {thread}, {lanes}") if lanes > 1 else thread
        position = self._sum(first, at)
        if whole:
            small = sum(s.value.size for s in self.statements) <= _REPEATED_NODES
            count = _LINES if small else 1
            with self._loop(warp, str(self.side), warps * count) as line:
                self._lines(row, position, [self._plus(line, k * warps) for k in range(count)])
            return
        with self._loop(warp, str(self.side), warps) as line:
            self._bind(row, line)
            here = f.fresh(f"icmp slt i64 {self.variables[self.tile]}, {self._extent(self.tile.extent)}")
            self._if(here, partial(self._rest_of_line, position))

    def _bind(self, row: str, line: str) -> None:
        self.variables[ROW] = line
        self.variables[self.tile] = self._sum(row, line)

    def _rest_of_line(self, position: str) -> None:
        f, lanes = self.f, self.mapping.lanes
        extent = self._extent(self.lane.extent)

        def run(active: int | str) -> None:
            with self._open_lanes(lanes, active, position):
                self._row()

        if lanes == 1:
            self._if(f.fresh(f"icmp slt i64 {position}, {extent}"), partial(run, 1))
            return
        rest = f.fresh(f"sub nsw i64 {extent}, {position}")
        some = partial(self._if, f.fresh(f"icmp sgt i64 {rest}, 0"), partial(run, rest))
        self._if(f.fresh(f"icmp sge i64 {rest}, {lanes}"), partial(run, lanes), some)

    def _lines(self, row: str, position: str, lines: list[str]) -> None:
        """Whole lines: everything is read before anything is written."""
        found: list[tuple[str, dict[object, Value], list[tuple[Store, Value]]]] = []
        stores = [s for s in self.statements if isinstance(s, Store)]
        with self._open_lanes(self.mapping.lanes, self.mapping.lanes, position):
            for line in lines:
                self._bind(row, line)
                with self._scope():
                    values = [(store, self._value(store.value)) for store in stores]
                    found.append((line, self.frames[-1], values))
            for line, known, values in found:
                self._bind(row, line)
                with self._scope(known):
                    for store, value in values:
                        self._store(store, value)
