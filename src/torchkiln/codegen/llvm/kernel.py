"""Kernels as LLVM functions: the loops around the statements, vector lanes and tails.

The function of a kernel is ``void (i64 begin, i64 end, ptr context)``: it runs parallel iterations ``[begin, end)``.
The context holds the data pointers of the parameters, then the sizes, then, where the kernel may fail, a pointer to the
cell for that. Loop invariants are hoisted.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import memory_type
from torchkiln.codegen.llvm.tiles import Tiles
from torchkiln.ir import index as ix
from torchkiln.ir.expr import (
    KernelMemory,
    Parameter,
    ScratchRow,
    TileBuffer,
)
from torchkiln.ir.index import Extent
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import Kernel


def emit_kernel(module: ModuleBuilder, kernel: Kernel, symbol: str) -> None:
    """Add the function of ``kernel`` to ``module`` under ``symbol`` (without ``@``)."""
    module.define(symbol, CpuWriter(module, kernel).function(symbol))


class CpuWriter(Tiles):
    """Writes the function of one kernel."""

    def __init__(self, module: ModuleBuilder, kernel: Kernel) -> None:
        super().__init__(module, kernel)
        mapping = self.mapping
        in_blocks = mapping.blocks != 1 and mapping.tile is None
        self.alignment = math.gcd(mapping.lanes, mapping.block) if in_blocks else mapping.lanes

    def function(self, symbol: str) -> str:
        f, nest = self.f, self.nest
        for number in range(len(nest.parameters)):
            slot = f.fresh(f"getelementptr ptr, ptr %context, i64 {number}")
            self.pointers[Parameter(number)] = f.fresh(f"load ptr, ptr {slot}")
        for number, size in enumerate(nest.sizes):
            slot = f.fresh(f"getelementptr i64, ptr %context, i64 {len(nest.parameters) + number}")
            self.sizes[size] = f.fresh(f"load i64, ptr {slot}")
        self._compute_extents()
        block = self._scratch()
        self.spare = self._slot("[64 x i8]")
        self._hoist(self.statements, {*nest.rows, *nest.columns})
        with self._loop("%begin", "%end") as iteration:
            self._parallel_iteration(iteration)
        if block is not None:
            self.module.declare("declare void @free(ptr)")
            f.emit(f"call void @free(ptr {block})")
        f.emit("ret void")
        body = "\n".join(f.lines)
        slots = "\n".join(f"  {line}" for line in self.slots)
        head = f"define void @{symbol}(i64 %begin, i64 %end, ptr %context) #0 {{\nentry:"
        return f"{head}\n{slots}\n{body}\n}}\n"

    def _scratch(self) -> str | None:
        """Rows kept between phases, and buffers of tiles.

        On the stack or, where their length is known only now, in a block to be freed.
        """
        f, columns, elements = self.f, extent_product(self.nest.columns), self._buffer_elements()
        lengths: dict[KernelMemory, tuple[Extent, torch.dtype]] = {
            ScratchRow(number): (columns, dtype) for number, dtype in enumerate(self.nest.scratch)
        }
        lengths |= {o.buffer: (elements, o.dtype) for o in self.operands if isinstance(o.buffer, TileBuffer)}
        for memory, (length, dtype) in list(lengths.items()):
            if isinstance(length, int):
                self.pointers[memory] = self._slot(f"[{max(length, 1)} x {memory_type(dtype)}]")
                del lengths[memory]
        if not lengths:
            return None
        self.module.declare("declare ptr @aligned_alloc(i64, i64)")
        starts = []
        total = "0"
        for length, dtype in lengths.values():
            starts.append(total)
            nbytes = f.fresh(f"mul i64 {self._extent(length)}, {dtype.itemsize}")
            # A row ends where the next begins, and both on a cache line.
            padded = f.fresh(f"and i64 {f.fresh(f'add i64 {nbytes}, 127')}, -64")
            total = f.fresh(f"add i64 {total}, {padded}")
        block = f.fresh(f"call ptr @aligned_alloc(i64 64, i64 {total})")
        missing, good, bad = f.fresh(f"icmp eq ptr {block}, null"), f.new_label("memory"), f.new_label("no_memory")
        f.emit(f"br i1 {missing}, label %{bad}, label %{good}")
        f.start_block(bad)
        place = len(self.nest.parameters) + len(self.nest.sizes)
        cell_at = f.fresh(f"getelementptr ptr, ptr %context, i64 {place}")
        f.emit(f"store i64 1, ptr {f.fresh(f'load ptr, ptr {cell_at}')}")
        f.emit("ret void")
        f.start_block(good)
        for memory, start in zip(lengths, starts, strict=True):
            self.pointers[memory] = f.fresh(f"getelementptr i8, ptr {block}, i64 {start}")
        return block

    # -- rows -------------------------------------------------------------------------------------------------

    def _parallel_iteration(self, iteration: str) -> None:
        """One iteration: its block of the last variable, its position in the parallel rows, then the other rows."""
        nest, mapping = self.nest, self.mapping
        blocks = mapping.blocks
        block = "0"
        if blocks != 1:
            count = self._extent(blocks)
            block = self.f.fresh(f"urem i64 {iteration}, {count}")
            iteration = self.f.fresh(f"udiv i64 {iteration}, {count}")
        parallel = nest.rows[: mapping.parallel_rows]
        for place, var in enumerate(reversed(parallel)):
            if place == len(parallel) - 1:
                self.variables[var] = iteration
            else:
                extent = self._extent(var.extent)
                self.variables[var] = self.f.fresh(f"urem i64 {iteration}, {extent}")
                iteration = self.f.fresh(f"udiv i64 {iteration}, {extent}")
        self._rows(mapping.parallel_rows, block)

    def _rows(self, depth: int, block: str) -> None:
        """The loops over ``rows[depth:]``."""
        nest = self.nest
        rest = nest.rows[depth:]
        self._hoist(self.statements, {*rest, *nest.columns})
        if rest and rest[0] is self.mapping.tile:
            if nest.columns:
                self._block_of_rows(block)
            else:
                self._block_of_tiles(block)
        elif rest and rest[0] is nest.lane:
            self._vector_rows(block)
        elif rest:
            with self._loop("0", self._extent(rest[0].extent)) as position:
                self.variables[rest[0]] = position
                self._rows(depth + 1, block)
        elif self.mapping.tile is not None and self.mapping.tile in nest.columns:
            self._row_in_tiles()
        else:
            self._row()

    def _vector_rows(self, block: str) -> None:
        """Several rows at once: all of the kernel is computed in lanes."""
        f, lanes, vector = self.f, self.mapping.lanes, self.nest.lane
        assert vector is not None
        split = self._split(vector.extent, lanes)
        blocks = self.mapping.blocks
        low, high = "0", split.whole
        if blocks != 1:
            low = f.fresh(f"mul i64 {block}, {self.mapping.block}")
            limit = f.fresh(f"add i64 {low}, {self.mapping.block}")
            past = f.fresh(f"icmp sgt i64 {limit}, {split.whole}")
            high = f.fresh(f"select i1 {past}, i64 {split.whole}, i64 {limit}")
        if split.whole == str(lanes) and blocks == 1:
            with self._scope(), self._open_lanes(lanes, lanes, "0"):
                self._row()
        elif split.whole != "0":
            with self._loop(low, high, lanes) as position, self._open_lanes(lanes, lanes, position):
                self._row()
        here = None if blocks == 1 else f"icmp eq i64 {block}, {self._extent(ix.extent(ix.as_index(blocks) - 1))}"
        self._tail(split, here, self._row)

    # -- blocks of the tile variable: what lies across the vector passes through buffers -----------------------------

    def _block_of_tiles(self, block: str) -> None:
        """A block against all of the vector variable, one vector after the other."""
        tile, vector, lanes = self.mapping.tile, self.nest.lane, self.mapping.lanes
        assert tile is not None
        assert vector is not None
        rows, split = self._span_of_block(block), self._split(vector.extent, lanes)

        def tiles(position: str, width: int, active: int | str) -> None:
            columns = self._span_of_vector(position, active)
            with self._bound("0", position):
                self._fill(rows, columns)
                if not self.statements:
                    return
                with self._loop(rows.start, rows.end) as row:
                    self.variables[tile] = row
                    number = self.f.fresh(f"sub nsw i64 {row}, {rows.start}")
                    with self._bound(number, position), self._open_lanes(width, active, position):
                        self._row()
                self._empty(rows, columns)

        if split.whole != "0":
            with self._loop("0", split.whole, lanes) as position:
                tiles(position, lanes, lanes)
        last = partial(tiles, split.whole, split.lanes, split.rest)
        if isinstance(split.rest, str):
            self._if(self.f.fresh(f"icmp ne i64 {split.rest}, 0"), last)
        elif split.rest:
            with self._scope():
                last()

    def _block_of_rows(self, block: str) -> None:
        """Rows of a kernel with columns: all columns of the block are transposed first."""
        tile, vector = self.mapping.tile, self.nest.lane
        assert tile is not None
        assert vector is not None
        rows, columns = self._span_of_block(block), self._span(vector.extent)
        with self._bound("0"):
            self._fill(rows, columns)
        with self._loop(rows.start, rows.end) as row:
            self.variables[tile] = row
            with self._bound(self.f.fresh(f"sub nsw i64 {row}, {rows.start}")):
                self._rows(len(self.nest.rows), block)
        with self._bound("0"):
            self._empty(rows, columns)

    def _row_in_tiles(self) -> None:
        """A row whose columns run along memory and across it: all of it is transposed first."""
        tile, vector = self.mapping.tile, self.nest.lane
        assert tile is not None
        assert vector is not None
        rows, columns = self._span(tile.extent), self._span(vector.extent)
        with self._bound("0"):
            self._fill(rows, columns)
            self._row()
            self._empty(rows, columns)
