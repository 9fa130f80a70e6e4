"""Kernels as LLVM functions: the loops around the statements, vector lanes and tails.

The function of a kernel is ``void (i64 begin, i64 end, ptr context)``: it runs parallel iterations
``[begin, end)``; the context holds the data pointer of every parameter.

Whatever does not change in a loop is computed before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torchkiln.codegen.llvm.evaluate import compares_positions
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Value, memory_type
from torchkiln.codegen.llvm.reduce import Accumulator, Reductions
from torchkiln.codegen.llvm.transpose import TILE, transposed
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue, Load, Masked, Reduced
from torchkiln.ir.index import DataIndex, Index, Quotient, Remainder, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import SUM_CHUNK, Accumulate, Kernel, Phase, Statement, Store


def emit_kernel(module: ModuleBuilder, kernel: Kernel, symbol: str) -> None:
    """Add the function of ``kernel`` to ``module`` under ``symbol`` (without ``@``)."""
    module.define(symbol, _Writer(module, kernel).function(symbol))


def choose_lanes(kernel: Kernel, vector_bits: int) -> int:
    """Lanes per value: about four registers, fewer for short or crowded loops.

    Four registers per value give independent chains that hide latency (layer norm + gelu: 286 µs against 403 µs
    at one). With many streams at once registers run out, so the width shrinks.
    """
    vector = kernel.vector
    if vector is None:
        return 1
    if kernel.tile is not None:
        return TILE
    roots = tuple(s.value for p in kernel.phases for s in (*p.before, *p.inside))
    widest, streams = 4, 0
    for node in ex.walk(roots):
        if vector not in node.variables or isinstance(node, IndexValue):
            continue
        if isinstance(node, Load):
            streams += 1
        if not compares_positions(node):
            widest = max(widest, node.dtype.itemsize)
    streams += sum(len(p.inside) for p in kernel.phases)
    registers = 4 if streams <= 10 else 2 if streams <= 20 else 1
    most = max(1, vector_bits * registers // (8 * widest))
    length = vector.extent
    best, best_price = 1, float("inf")
    lanes = most
    while lanes >= min(most, 4):
        # Lanes computed in all (masked ones included) plus a share per trip for loop overhead.
        full, rest = divmod(length, lanes)
        tail = _round_up_power(rest) if rest else 0
        price = full * (lanes + 2) + (tail + 4 if tail else 0)
        if price < best_price:
            best, best_price = lanes, price
        lanes //= 2
    return best


def _round_up_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


class _Writer(Reductions):
    """Writes the function of one kernel."""

    def __init__(self, module: ModuleBuilder, kernel: Kernel) -> None:
        super().__init__(module, kernel.vector, (*kernel.rows, *kernel.columns))
        self.kernel = kernel
        self.full_lanes = choose_lanes(kernel, module.vector_bits)
        self.alignment = math.gcd(self.full_lanes, kernel.block) if kernel.blocks > 1 else self.full_lanes
        self.reduces_lanes = kernel.vector is not None and kernel.vector in kernel.columns
        self.statements: list[Statement] = [s for p in kernel.phases for s in (*p.before, *p.inside)]
        self.loaded = {n.buffer for n in ex.walk(tuple(s.value for s in self.statements)) if isinstance(n, Load)}
        self.stored = {
            s.parameter if isinstance(s.parameter, str) else f"%{s.parameter}"
            for s in self.statements
            if isinstance(s, Store)
        }

    def function(self, symbol: str) -> str:
        f, kernel = self.f, self.kernel
        for number in range(len(kernel.parameters)):
            slot = f.fresh(f"getelementptr ptr, ptr %context, i64 {number}")
            self.pointers[f"%{number}"] = f.fresh(f"load ptr, ptr {slot}")
        columns = extent_product(kernel.columns)
        for row in kernel.scratch:
            self.pointers[row.name] = self._slot(f"[{max(columns, 1)} x {memory_type(row.dtype)}]")
        self.spare = self._slot("[64 x i8]")
        everything = {*kernel.rows, *kernel.columns}
        self._hoist(self.statements, everything)
        self._loop("%begin", "%end", "1", self._parallel_iteration)
        f.emit("ret void")
        body = "\n".join(f.lines)
        slots = "\n".join(f"  {line}" for line in self.slots)
        head = f"define internal void @{symbol}(i64 %begin, i64 %end, ptr %context) #0 {{\nentry:"
        return f"{head}\n{slots}\n{body}\n}}\n"

    # -- rows -------------------------------------------------------------------------------------------------

    def _parallel_iteration(self, iteration: str) -> None:
        """One iteration: its block of the last variable, its position in the parallel rows, then the other rows."""
        kernel = self.kernel
        blocks = kernel.blocks
        block = "0"
        if blocks > 1:
            block = self.f.fresh(f"urem i64 {iteration}, {blocks}")
            iteration = self.f.fresh(f"udiv i64 {iteration}, {blocks}")
        parallel = kernel.rows[: kernel.parallel_rows]
        for place, var in enumerate(reversed(parallel)):
            if place == len(parallel) - 1:
                self.variables[var] = iteration
            else:
                self.variables[var] = self.f.fresh(f"urem i64 {iteration}, {var.extent}")
                iteration = self.f.fresh(f"udiv i64 {iteration}, {var.extent}")
        self._rows(kernel.parallel_rows, block)

    def _rows(self, depth: int, block: str) -> None:
        """The loops over ``rows[depth:]``."""
        kernel = self.kernel
        rest = kernel.rows[depth:]
        self._hoist(self.statements, {*rest, *kernel.columns})
        if kernel.tile is not None and rest == kernel.rows[-2:]:
            self._tiles(block)
        elif rest and rest[0] is kernel.vector:
            self._vector_rows(block)
        elif rest:
            var = rest[0]

            def step(position: str) -> None:
                self.variables[var] = position
                self._rows(depth + 1, block)

            self._loop("0", str(var.extent), "1", step)
        else:
            self._row()

    def _vector_rows(self, block: str) -> None:
        """Several rows at once: all of the kernel is computed in lanes."""
        f, lanes, vector = self.f, self.full_lanes, self.kernel.vector
        assert vector is not None
        rest = vector.extent % lanes
        whole = vector.extent - rest
        blocks = self.kernel.blocks if self.kernel.tile is None else 1
        low, high = "0", str(whole)
        if blocks > 1:
            low = f.fresh(f"mul i64 {block}, {self.kernel.block}")
            limit = f.fresh(f"add i64 {low}, {self.kernel.block}")
            past = f.fresh(f"icmp sgt i64 {limit}, {whole}")
            high = f.fresh(f"select i1 {past}, i64 {whole}, i64 {limit}")
        if whole == lanes and blocks == 1:
            self._in_scope(lambda: self._with_lanes(lanes, lanes, "0", self._row))
        elif whole:
            self._loop(low, high, str(lanes), lambda position: self._with_lanes(lanes, lanes, position, self._row))
        if not rest:
            return
        tail = _round_up_power(rest)
        if blocks == 1:
            self._in_scope(lambda: self._with_lanes(tail, rest, str(whole), self._row))
        else:
            last = f.fresh(f"icmp eq i64 {block}, {blocks - 1}")
            self._if(last, lambda: self._with_lanes(tail, rest, str(whole), self._row))

    def _in_scope(self, body: Callable[[], None]) -> None:
        self.frames.append({})
        body()
        self.frames.pop()

    # -- tiles: what lies across the vector is read along memory and turned in registers --------------------------

    def _tiles(self, block: str) -> None:
        """A block of the tile variable against all of the vector variable."""
        f, kernel = self.f, self.kernel
        tile = kernel.tile
        assert tile is not None
        start = f.fresh(f"mul i64 {block}, {TILE}")
        full_blocks = tile.extent // TILE

        def whole_block() -> None:
            self._tile_row(start)

        def single_rows() -> None:
            def step(position: str) -> None:
                self.variables[tile] = position
                self._vector_rows("0")

            self._loop(start, str(tile.extent), "1", step)

        if tile.extent % TILE == 0:
            whole_block()
            return
        if full_blocks:
            self._if(f.fresh(f"icmp slt i64 {block}, {full_blocks}"), whole_block)
        self._if(f.fresh(f"icmp eq i64 {block}, {full_blocks}"), single_rows)

    def _tile_row(self, start: str) -> None:
        f, kernel = self.f, self.kernel
        tile, vector = kernel.tile, kernel.vector
        assert tile is not None
        assert vector is not None
        crossing = crossing_loads(self.statements, vector, tile)
        rest = vector.extent % TILE
        whole = vector.extent - rest

        def at(step: int) -> None:
            self.variables[tile] = start if step == 0 else f.fresh(f"add i64 {start}, {step}")

        def one(position: str) -> None:
            at(0)
            self.variables[vector] = position
            self.frames.append({})  # what is computed here holds for the first row of the tile alone
            turned = {load: self._turned(load, vector) for load in crossing}
            self.frames.pop()
            for step in range(TILE):
                self.frames.append({load: values[step] for load, values in turned.items()})
                at(step)
                self._with_lanes(TILE, TILE, position, self._row)
                self.frames.pop()

        if whole:
            self._loop("0", str(whole), str(TILE), one)
        if rest:

            def tail(position: str) -> None:
                self.variables[tile] = f.fresh(f"add i64 {start}, {position}")
                self._with_lanes(_round_up_power(rest), rest, str(whole), self._row)

            self._loop("0", str(TILE), "1", tail)

    def _turned(self, load: Load, vector: Var) -> list[Value]:
        """The tile of a load as vectors along the vector variable, one per position of the tile variable."""
        offset = load.subscripts[0]
        stride = offset.coefficient(vector)
        assert stride is not None
        element = memory_type(load.dtype)
        base = self._scalar_index(offset)
        rows = []
        for lane in range(TILE):
            place = base if lane == 0 else self.f.fresh(f"add nsw i64 {base}, {lane * stride}")
            address = self.f.fresh(f"getelementptr inbounds {element}, ptr {self.pointers[load.buffer]}, i64 {place}")
            rows.append(self.f.fresh(f"load <{TILE} x {element}>, ptr {address}, align {load.dtype.itemsize}"))
        return [self._from_memory(row, load.dtype, TILE) for row in transposed(self.f, rows, element)]

    # -- one row (or one vector of rows) --------------------------------------------------------------------

    def _row(self) -> None:
        self.reduced = {}
        for phase in self.kernel.phases:
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
            elif f"%{statement.parameter}" in self.loaded:
                late.append((statement, value))
            else:
                self._store(statement, value)
        for statement, value in late:
            self._store(statement, value)

    def _columns(self, phase: Phase) -> None:
        kernel = self.kernel
        vector = kernel.vector if self.reduces_lanes else None
        inner_lanes = self.full_lanes if vector is not None else self.lanes
        rest = vector.extent % inner_lanes if vector is not None else 0
        widths = [inner_lanes] if vector is None or vector.extent >= inner_lanes else []
        if rest:
            widths.append(_round_up_power(rest))
        accumulators = {s.name: self._accumulator(s, widths) for s in phase.inside if isinstance(s, Accumulate)}
        plain = [v for v in kernel.columns if v is not vector]

        def nest(depth: int) -> None:
            remaining = {*plain[depth:], *((vector,) if vector is not None else ())}
            self._hoist(phase.inside, remaining)
            if depth < len(plain):
                var = plain[depth]

                def step(position: str) -> None:
                    self.variables[var] = position
                    nest(depth + 1)

                if vector is None and depth == len(plain) - 1 and var.extent > 2 * SUM_CHUNK:

                    def chunk(start: str) -> None:
                        end = self.f.fresh(f"add nsw i64 {start}, {SUM_CHUNK}")
                        past = self.f.fresh(f"icmp sgt i64 {end}, {var.extent}")
                        limit = self.f.fresh(f"select i1 {past}, i64 {var.extent}, i64 {end}")
                        aside = self._begin_chunk(accumulators.values())
                        self._loop(start, limit, "1", step)
                        self._end_chunk(aside)

                    self._loop("0", str(var.extent), str(SUM_CHUNK), chunk)
                else:
                    self._loop("0", str(var.extent), "1", step)
            elif vector is not None:
                self._vector_columns(vector, inner_lanes, rest, phase, accumulators)
            else:
                self._run(phase.inside, accumulators)

        nest(0)
        for name, accumulator in accumulators.items():
            self.reduced[name] = self._finish(accumulator)

    def _vector_columns(
        self, vector: Var, lanes: int, rest: int, phase: Phase, accumulators: dict[str, Accumulator]
    ) -> None:
        whole = vector.extent - rest

        def body() -> None:
            self._run(phase.inside, accumulators)

        if whole == lanes:
            self._in_scope(lambda: self._with_lanes(lanes, lanes, "0", body))
        elif whole:
            self._loop("0", str(whole), str(lanes), lambda position: self._with_lanes(lanes, lanes, position, body))
        if rest:
            self._in_scope(lambda: self._with_lanes(_round_up_power(rest), rest, str(whole), body))

    # -- hoisting -------------------------------------------------------------------------------------------

    def _hoist(self, statements: Iterable[Statement], inner: set[Var]) -> None:
        """Emit now whatever the statements need that does not change with ``inner``."""
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
            if not node.variables & inner and not self._waits(node):
                self._value(node)
                continue
            if isinstance(node, Masked):
                stack.append(node.condition)
                continue
            if isinstance(node, Load):
                self._hoist_index(node.subscripts[0], inner)
            elif isinstance(node, IndexValue):
                self._hoist_index(node.index, inner)
            stack.extend(ex.operands(node))

    def _waits(self, node: Expr) -> bool:
        """Whether a value needs a reduction that is not finished yet, or memory that this kernel writes."""
        return any(
            (isinstance(n, Reduced) and n.name not in self.reduced) or (isinstance(n, Load) and n.buffer in self.stored)
            for n in ex.walk((node,))
        )

    def _hoist_index(self, index: Index, inner: set[Var]) -> None:
        fixed = {
            m: c for m, c in index.terms.items() if not any(ix.atom_variables(a) & inner for a in m) and not _reads(m)
        }
        if fixed:
            self._scalar_index(Index(fixed, index.const))


def crossing_loads(statements: Iterable[Statement], vector: Var, tile: Var) -> list[Load]:
    """Loads that run along ``tile`` in memory and across ``vector``, outside any guard."""
    found: dict[Load, None] = {}
    seen: set[Expr] = set()
    stack = [s.value for s in statements]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Masked):
            stack.append(node.condition)
            continue
        if isinstance(node, Load):
            offset = node.subscripts[0]
            if offset.coefficient(tile) == 1 and offset.coefficient(vector) not in (None, 0, 1):
                found[node] = None
        stack.extend(ex.operands(node))
    return list(found)


def _reads(monomial: tuple[ix.Atom, ...]) -> bool:
    """Whether a term needs a value from memory (which may be guarded, so it is not moved out of its place)."""
    return any(
        isinstance(a, DataIndex)
        or (isinstance(a, Quotient | Remainder) and any(_reads((b,)) for b in a.numerator.atoms()))
        for a in monomial
    )
