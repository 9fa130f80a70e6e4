"""Kernels as LLVM functions: the loops around the statements, vector lanes and tails.

The function of a kernel is ``void (i64 begin, i64 end, ptr context)``: it runs parallel iterations ``[begin, end)``.
The context holds the data pointers of the parameters, then the sizes, then, where the kernel may fail, a pointer to the
cell for that. Loop invariants are hoisted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Value, memory_type
from torchkiln.codegen.llvm.reduce import Accumulator, is_float_sum
from torchkiln.codegen.llvm.tiles import Tiles
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import (
    Constant,
    Expr,
    FlatLoad,
    IndexValue,
    KernelMemory,
    Masked,
    Parameter,
    Reduced,
    ScratchRow,
    TileBuffer,
)
from torchkiln.ir.index import DataIndex, Extent, Index, Quotient, Remainder, Var
from torchkiln.schedule.cpu import round_up_power
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import Accumulate, Kernel, Phase, Statement, Store
from torchkiln.schedule.loops import indices_of_values

# Terms of a float sum that a lane adds one after the other; beyond twice as many, chunks of this many are summed by
# themselves first, and chunks of chunks. Equal terms are all rounded in one direction, so the error grows with the
# longest run: 1e7 times 0.1 was off by 2.3e-5 with runs of 2,441 and is by 1.1e-7 so, eager's cascade by 5.8e-7.
# Runs of 32 are off by 3.9e-7 and no faster.
SUM_CHUNK = 16
# Levels of chunks within chunks at the most: of 64 lanes, the longest then are 4 million terms.
_LEVELS = 4


_Body = Callable[[str], None]  # what a loop does at a position
_Sums = Sequence[Accumulator]


def emit_kernel(module: ModuleBuilder, kernel: Kernel, symbol: str) -> None:
    """Add the function of ``kernel`` to ``module`` under ``symbol`` (without ``@``)."""
    module.define(symbol, _Writer(module, kernel).function(symbol))


@dataclass(frozen=True)
class _Split:
    """Along a variable full vectors run to ``whole``; ``rest`` values follow, in one vector of ``lanes``."""

    whole: str
    rest: int | str
    lanes: int


class _Writer(Tiles):
    """Writes the function of one kernel."""

    def __init__(self, module: ModuleBuilder, kernel: Kernel) -> None:
        super().__init__(module, kernel)
        nest, mapping = self.nest, kernel.mapping
        in_blocks = mapping.blocks != 1 and mapping.tile is None
        self.alignment = math.gcd(mapping.lanes, mapping.block) if in_blocks else mapping.lanes
        self.reduces_lanes = nest.lane is not None and nest.lane in nest.columns
        self.statements: list[Statement] = nest.statements
        nodes = ex.walk(tuple(s.value for s in self.statements))
        self.loaded = {node.memory for node in nodes if isinstance(node, FlatLoad)}
        self.stored = {s.memory for s in self.statements if isinstance(s, Store)}

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

    def _compute_extents(self) -> None:
        """Extents and divisors first, so that no loop recomputes them."""
        for var in (*self.nest.rows, *self.nest.columns):
            self._extent(var.extent)
        indices = indices_of_values(self.nest) + [operand.offset for operand in self.operands]
        while indices:
            for atom in indices.pop().atoms():
                if isinstance(atom, Quotient | Remainder):
                    self._divisor(atom.divisor)
                    indices.append(atom.numerator)

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

    def _split(self, extent: Extent, lanes: int) -> _Split:
        """Where the full vectors of ``lanes`` along a variable end, and how the rest is done."""
        if isinstance(extent, int):
            rest = extent % lanes
            return _Split(str(extent - rest), rest, round_up_power(rest))
        length = self._extent(extent)
        whole = self.f.fresh(f"and i64 {length}, {-lanes}")
        return _Split(whole, self.f.fresh(f"sub i64 {length}, {whole}"), lanes)

    def _tail(self, split: _Split, here: str | None, body: Callable[[], None]) -> None:
        """What is left after the full vectors, if anything; ``here`` is a comparison that must hold as well."""
        if split.rest == 0:
            return
        condition = None if here is None else self.f.fresh(here)
        if isinstance(split.rest, str):
            some = self.f.fresh(f"icmp ne i64 {split.rest}, 0")
            condition = some if condition is None else self.f.fresh(f"and i1 {condition}, {some}")

        def in_lanes() -> None:
            with self._open_lanes(split.lanes, split.rest, split.whole):
                body()

        if condition is None:
            with self._scope():
                in_lanes()
        else:
            self._if(condition, in_lanes)

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

    # -- one row (or one vector of rows) --------------------------------------------------------------------

    def _row(self) -> None:
        self.reduced = {}
        for phase in self.nest.phases:
            self._run(phase.before)
            if phase.inside:
                self._columns(phase)

    def _run(self, statements: Iterable[Statement], accumulators: dict[str, Accumulator] | None = None) -> None:
        """Emit statements. Stores to memory that is read here come last, after everything was read."""
        late: list[tuple[Store, Value]] = []
        for statement in statements:
            value = self._value(statement.value)
            if isinstance(statement, Accumulate):
                assert accumulators is not None
                self._accumulate(accumulators[statement.name], value)
            elif statement.memory in self.loaded and isinstance(statement.memory, Parameter):
                late.append((statement, value))
            else:
                self._store(statement, value)
        for statement, value in late:
            self._store(statement, value)

    def _columns(self, phase: Phase) -> None:
        vector = self.nest.lane if self.reduces_lanes else None
        inner_lanes = self.mapping.lanes if vector is not None else self.lanes
        split = self._split(vector.extent, inner_lanes) if vector is not None else _Split("", 0, inner_lanes)
        widths = [] if split.whole == "0" else [inner_lanes]
        if split.rest != 0 and split.lanes not in widths:
            widths.append(split.lanes)
        accumulators = {s.name: self._accumulator(s, widths) for s in phase.inside if isinstance(s, Accumulate)}
        plain = [v for v in self.nest.columns if v is not vector]
        loops = [(v, 1) for v in plain] + ([] if vector is None else [(vector, inner_lanes)])
        chunks = _chunks_of_nest(loops)
        sums = [accumulator for accumulator in accumulators.values() if is_float_sum(accumulator.statement)]
        run = partial(self._run, phase.inside, accumulators)

        def nest(depth: int) -> None:
            remaining = {*plain[depth:], *((vector,) if vector is not None else ())}
            self._hoist(phase.inside, remaining)
            if depth < len(plain):

                def step(position: str) -> None:
                    self.variables[plain[depth]] = position
                    nest(depth + 1)

                self._sum_loop(self._extent(plain[depth].extent), 1, chunks[depth], sums, step)
            elif vector is not None:
                # With loops around it, what it adds up is one term of theirs, and is set aside.
                short = not plain and ix.hint_of(vector.extent) <= 2 * min(chunks[depth], default=0)
                self._vector_columns(inner_lanes, split, chunks[depth], sums, run, short=short)
            else:
                run()

        nest(0)
        for name, accumulator in accumulators.items():
            self.reduced[name] = self._finish(accumulator)

    def _vector_columns(
        self, lanes: int, split: _Split, chunks: Sequence[int], sums: _Sums, body: Callable[[], None], *, short: bool
    ) -> None:
        def vector(position: str) -> None:
            with self._open_lanes(lanes, lanes, position):
                body()

        if split.whole == str(lanes):
            with self._scope():
                vector("0")
        elif split.whole != "0":
            self._sum_loop(split.whole, lanes, chunks, sums, vector, short=short)
        self._tail(split, None, body)

    def _sum_loop(
        self, end: str, step: int, chunks: Sequence[int], sums: _Sums, body: _Body, *, short: bool = False
    ) -> None:
        """A loop from 0 that takes ``sums`` in chunks of these lengths, the longest first, one inside the other.

        With ``short``, few steps are likely, and those that need no chunks have a loop of their own.
        """
        if chunks and sums and short:
            # Setting aside the only chunk took as long as its sum: 512 x 512 sums of 64 values 1.8 ms instead of 1.1.
            few = self.f.fresh(f"icmp sle i64 {end}, {2 * chunks[-1]}")
            whole, chunked = (partial(self._chunks, "0", end, step, lengths, sums, body) for lengths in ((), chunks))
            self._if(few, whole, chunked)
        else:
            self._chunks("0", end, step, chunks if sums else (), sums, body)

    def _chunks(self, start: str, end: str, step: int, lengths: Sequence[int], sums: _Sums, body: _Body) -> None:
        """A loop in chunks of the first length, each in chunks of the others; without lengths, of single steps."""
        if not lengths:
            with self._loop(start, end, step) as position:
                body(position)
            return
        with self._loop(start, end, lengths[0]) as position:
            after = self.f.fresh(f"add nsw i64 {position}, {lengths[0]}")
            past = self.f.fresh(f"icmp sgt i64 {after}, {end}")
            here = self.f.fresh(f"select i1 {past}, i64 {end}, i64 {after}")
            aside = self._begin_chunk(sums)
            if lengths[0] == step:  # the terms of one iteration are as many as a chunk has
                body(position)
            else:
                self._chunks(position, here, step, lengths[1:], sums, body)
            self._end_chunk(aside)

    # -- hoisting -------------------------------------------------------------------------------------------

    def _hoist(self, statements: Iterable[Statement], inner: set[Var]) -> None:
        """Emit now whatever the statements need that does not change with ``inner``.

        Memory is read early only where every loop of ``inner`` is sure to run.
        """
        sure = all(ix.bounds_of(v.extent)[0] >= 1 for v in inner)
        inner = inner | self.unbound
        seen: set[Expr] = set()
        stack: list[Expr] = []
        for statement in statements:
            stack.append(statement.value)
            if isinstance(statement, Store):
                self._hoist_index(statement.offset, inner)
        while stack:
            node = stack.pop()
            if node in seen or isinstance(node, Constant | Reduced):
                continue
            seen.add(node)
            if not node.variables & inner and not self._waits(node) and (sure or not ex.reads_memory(node)):
                self._value(node)
                continue
            if isinstance(node, Masked):
                stack.append(node.condition)
                continue
            if isinstance(node, FlatLoad):
                self._hoist_index(node.offset, inner)
            elif isinstance(node, IndexValue):
                self._hoist_index(node.index, inner)
            stack.extend(node.operands)

    def _waits(self, node: Expr) -> bool:
        """Whether a value needs a reduction that is not finished yet, or memory that this kernel writes."""
        return any(
            (isinstance(n, Reduced) and n.name not in self.reduced)
            or (isinstance(n, FlatLoad) and n.memory in self.stored)
            for n in ex.walk((node,))
        )

    def _hoist_index(self, index: Index, inner: set[Var]) -> None:
        fixed = {
            m: c for m, c in index.terms.items() if not any(ix.atom_variables(a) & inner for a in m) and not _reads(m)
        }
        if fixed:
            self._scalar_index(Index(fixed, index.const))


def _chunks_of_nest(loops: Sequence[tuple[Var, int]]) -> list[tuple[int, ...]]:
    """For each loop of a nest, outermost first, the lengths of the chunks in which it takes sums, the longest first.

    A loop is its variable and its step. Wherever terms or chunks are added one after the other, they are about
    ``SUM_CHUNK``, and twice as many at the most: across the loops of the nest, not in each of them alone.
    """
    found: list[tuple[int, ...]] = []
    terms = 1  # that one iteration adds to what there is so far
    for var, step in reversed(loops):
        trips, most = ix.hint_of(var.extent) // step, ix.bounds_of(var.extent)[1] // step
        length = max(1, SUM_CHUNK // terms)
        lengths: list[int] = []
        while most > 2 * length and len(lengths) < _LEVELS:
            lengths.append(length)
            length *= SUM_CHUNK
        terms = max(1, -(-trips // lengths[-1]) if lengths else trips * terms)
        found.append(tuple(step * n for n in reversed(lengths)))
    return found[::-1]


def _reads(monomial: tuple[ix.Atom, ...]) -> bool:
    """Whether a term needs a value from memory (which may be guarded, so it is not moved out of its place)."""
    return any(
        isinstance(a, DataIndex)
        or (isinstance(a, Quotient | Remainder) and any(_reads((b,)) for b in a.numerator.atoms()))
        for a in monomial
    )
