"""Kernels as LLVM functions: loops, vector lanes, masked tails, reductions.

The function of a kernel is ``void (i64 begin, i64 end, ptr context)``: it runs parallel iterations
``[begin, end)``; the context holds the data pointer of every parameter, then a pointer to the error cell.

A value is emitted once, at the outermost loop where all it depends on is known: what does not change in a loop
is computed before it. What does not depend on the vector variable stays a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import (
    Instructions,
    Value,
    apply,
    compare,
    memory_type,
    register_type,
    splat_literal,
    suffix,
    vector_type,
)
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue, Load, Masked, Op, Reduced
from torchkiln.ir.index import DataIndex, Index, Quotient, Remainder, Var
from torchkiln.schedule.dependencies import extent_product
from torchkiln.schedule.kernel import Accumulate, Kernel, Phase, Statement, Store
from torchkiln.schedule.split import identity

_INT32 = 1 << 31
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_ORDERED_REDUCERS = {"argmax": "max", "argmin": "min"}


def emit_kernel(module: ModuleBuilder, kernel: Kernel, symbol: str, *, vector_bits: int) -> None:
    """Add the function of ``kernel`` to ``module`` under ``symbol`` (without ``@``)."""
    module.define(symbol, _Writer(module, kernel, vector_bits).function(symbol))


def choose_lanes(kernel: Kernel, vector_bits: int) -> int:
    """Lanes per value: about four registers, fewer for short or crowded loops.

    Four registers per value give independent chains that hide latency (layer norm + gelu: 286 µs against 403 µs
    at one). With many streams at once registers run out, so the width shrinks.
    """
    vector = kernel.vector
    if vector is None:
        return 1
    roots = tuple(s.value for p in kernel.phases for s in (*p.before, *p.inside))
    widest, streams = 4, 0
    for node in ex.walk(roots):
        if vector not in node.variables or isinstance(node, IndexValue):
            continue
        if isinstance(node, Load):
            streams += 1
        if not _compares_positions(node):
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


def _compares_positions(node: Expr) -> bool:
    return (
        isinstance(node, Op)
        and node.name in _COMPARISONS
        and all(isinstance(a, IndexValue | Constant) for a in node.args)
    )


def _round_up_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@dataclass
class _Accumulator:
    statement: Accumulate
    slots: list[tuple[str, str | None, int]]  # (value slot, position slot, lanes), one per width in use


class _Writer:
    """Writes one function. State: the open loops, the values known at this point, the active lanes."""

    def __init__(self, module: ModuleBuilder, kernel: Kernel, vector_bits: int) -> None:
        self.module = module
        self.kernel = kernel
        self.f = Instructions(module)
        self.full_lanes = choose_lanes(kernel, vector_bits)
        self.lanes = 1
        self.active = 1
        self.slots: list[str] = []
        self.frames: list[dict[object, Value]] = [{}]
        self.guards: list[Value] = []
        self.variables: dict[Var, str] = {}
        self.reduced: dict[str, Value] = {}
        self.pointers: dict[str, str] = {}
        self.levels = {v: k for k, v in enumerate((*kernel.rows, *kernel.columns))}
        self.slot_count = 0
        self.loaded = {
            node.buffer
            for node in ex.walk(tuple(s.value for p in kernel.phases for s in (*p.before, *p.inside)))
            if isinstance(node, Load)
        }

    # -- the function -------------------------------------------------------------------------------------

    def function(self, symbol: str) -> str:
        f, kernel = self.f, self.kernel
        for number in range(len(kernel.parameters) + 1):
            slot = f.fresh(f"getelementptr ptr, ptr %context, i64 {number}")
            self.pointers[f"%{number}"] = f.fresh(f"load ptr, ptr {slot}")
        self.error_cell = self.pointers[f"%{len(kernel.parameters)}"]
        columns = extent_product(kernel.columns)
        for row in kernel.scratch:
            self.pointers[row.name] = self._slot(f"[{max(columns, 1)} x {memory_type(row.dtype)}]")
        self.spare = self._slot("[64 x i8]")
        self._loop("%begin", "%end", "1", self._parallel_iteration)
        f.emit("ret void")
        body = "\n".join(f.lines)
        slots = "\n".join(f"  {line}" for line in self.slots)
        return (
            f"define internal void @{symbol}(i64 %begin, i64 %end, ptr %context) #0 {{\nentry:\n{slots}\n{body}\n}}\n"
        )

    def _slot(self, type_: str) -> str:
        """Stack memory of the function, allocated once on entry."""
        self.slot_count += 1
        name = f"%slot{self.slot_count}"
        self.slots.append(f"{name} = alloca {type_}, align 64")
        return name

    def _loop(self, start: str, stop: str, step: str, body: Callable[[str], None]) -> None:
        """``for (counter = start; counter < stop; counter += step)``, in a scope of its own."""
        f = self.f
        counter = self._slot("i64")
        head, inside, done = f.new_label("head"), f.new_label("body"), f.new_label("done")
        f.emit(f"store i64 {start}, ptr {counter}")
        f.branch(head)
        f.start_block(head)
        current = f.fresh(f"load i64, ptr {counter}")
        more = f.fresh(f"icmp slt i64 {current}, {stop}")
        f.emit(f"br i1 {more}, label %{inside}, label %{done}")
        f.start_block(inside)
        self.frames.append({})
        body(current)
        self.frames.pop()
        following = f.fresh(f"add nsw i64 {current}, {step}")
        f.emit(f"store i64 {following}, ptr {counter}")
        f.branch(head)
        f.start_block(done)

    def _parallel_iteration(self, iteration: str) -> None:
        kernel = self.kernel
        outer = list(kernel.rows)
        rest = iteration
        if kernel.vector is not None and kernel.vector in kernel.rows:
            outer.pop()
            blocks = -(-kernel.vector.extent // kernel.block)
            block, rest = "0", iteration
            if blocks > 1:
                block = self.f.fresh(f"urem i64 {iteration}, {blocks}")
                rest = self.f.fresh(f"udiv i64 {iteration}, {blocks}")
            self._decode(rest, outer)
            self._vector_rows(kernel.vector, block, blocks)
            return
        self._decode(rest, outer)
        self._row()

    def _decode(self, position: str, variables: Sequence[Var]) -> None:
        """Row variables from the flat position, the last one running fastest."""
        for place, var in enumerate(reversed(variables)):
            if place == len(variables) - 1:
                self.variables[var] = position
            else:
                self.variables[var] = self.f.fresh(f"urem i64 {position}, {var.extent}")
                position = self.f.fresh(f"udiv i64 {position}, {var.extent}")

    # -- vector variable among the rows: all of the kernel is computed for several rows at once ----------------

    def _vector_rows(self, vector: Var, block: str, blocks: int) -> None:
        f, lanes = self.f, self.full_lanes
        everything = [s for p in self.kernel.phases for s in (*p.before, *p.inside)]
        self._hoist(everything, {vector, *self.kernel.columns})
        rest = vector.extent % lanes
        whole = vector.extent - rest
        if blocks == 1:
            low, high = "0", str(whole)
        else:
            low = f.fresh(f"mul i64 {block}, {self.kernel.block}")
            limit = f.fresh(f"add i64 {low}, {self.kernel.block}")
            past = f.fresh(f"icmp sgt i64 {limit}, {whole}")
            high = f.fresh(f"select i1 {past}, i64 {whole}, i64 {limit}")

        def full(position: str) -> None:
            self._with_lanes(lanes, lanes, vector, position, self._row)

        if whole:
            if blocks == 1 and whole == lanes:
                self.frames.append({})
                full("0")
                self.frames.pop()
            else:
                self._loop(low, high, str(lanes), full)
        if rest:
            tail = _round_up_power(rest)

            def partial() -> None:
                self._with_lanes(tail, rest, vector, str(whole), self._row)

            if blocks == 1:
                self.frames.append({})
                partial()
                self.frames.pop()
            else:
                last = f.fresh(f"icmp eq i64 {block}, {blocks - 1}")
                self._if(last, partial)

    def _if(self, condition: str, body: Callable[[], None]) -> None:
        f = self.f
        inside, done = f.new_label("then"), f.new_label("after")
        f.emit(f"br i1 {condition}, label %{inside}, label %{done}")
        f.start_block(inside)
        self.frames.append({})
        body()
        self.frames.pop()
        f.branch(done)
        f.start_block(done)

    def _with_lanes(self, lanes: int, active: int, vector: Var, position: str, body: Callable[[], None]) -> None:
        saved = self.lanes, self.active
        self.lanes, self.active = lanes, active
        self.variables[vector] = position
        body()
        self.lanes, self.active = saved

    # -- one row (or one vector of rows) --------------------------------------------------------------------

    def _row(self) -> None:
        for phase in self.kernel.phases:
            self._run(phase.before)
            if phase.inside:
                self._columns(phase)

    def _run(self, statements: Iterable[Statement], accumulators: dict[str, _Accumulator] | None = None) -> None:
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
        vector = kernel.vector if kernel.vector in kernel.columns else None
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

                self._loop("0", str(var.extent), "1", step)
            elif vector is not None:
                self._vector_columns(vector, inner_lanes, rest, phase, accumulators)
            else:
                self._run(phase.inside, accumulators)

        nest(0)
        for name, accumulator in accumulators.items():
            self.reduced[name] = self._finish(accumulator, horizontal=vector is not None)

    def _vector_columns(
        self, vector: Var, lanes: int, rest: int, phase: Phase, accumulators: dict[str, _Accumulator]
    ) -> None:
        whole = vector.extent - rest

        def body() -> None:
            self._run(phase.inside, accumulators)

        def full(position: str) -> None:
            self._with_lanes(lanes, lanes, vector, position, body)

        if whole == lanes:
            self.frames.append({})
            full("0")
            self.frames.pop()
        elif whole:
            self._loop("0", str(whole), str(lanes), full)
        if rest:
            self.frames.append({})
            self._with_lanes(_round_up_power(rest), rest, vector, str(whole), body)
            self.frames.pop()

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
            if node in seen or isinstance(node, Constant):
                continue
            seen.add(node)
            if isinstance(node, Reduced):
                continue
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
        """Whether a value needs a reduction of this kernel that is not finished yet, or a scratch row."""
        return any(
            (isinstance(n, Reduced) and n.name not in self.reduced)
            or (isinstance(n, Load) and (not n.buffer.startswith("%") or self._is_written(n.buffer)))
            for n in ex.walk((node,))
        )

    def _is_written(self, buffer: str) -> bool:
        return any(
            isinstance(s, Store) and f"%{s.parameter}" == buffer
            for p in self.kernel.phases
            for s in (*p.before, *p.inside)
        )

    def _hoist_index(self, index: Index, inner: set[Var]) -> None:
        fixed = {
            m: c for m, c in index.terms.items() if not any(ix.atom_variables(a) & inner for a in m) and not _reads(m)
        }
        if fixed:
            self._scalar_index(Index(fixed, index.const))

    # -- values ---------------------------------------------------------------------------------------------

    def _known(self, key: object) -> Value | None:
        for frame in reversed(self.frames):
            found = frame.get(key)
            if found is not None and found.lanes in (1, self.lanes):
                return found
        return None

    def _value(self, node: Expr) -> Value:
        if isinstance(node, Reduced):
            return self.reduced[node.name]
        if isinstance(node, Constant):
            return self.f.constant(node.value, node.dtype)
        found = self._known(node)
        if found is None:
            found = self._compute(node)
            self.frames[-1][node] = found
        return found

    def _compute(self, node: Expr) -> Value:
        if isinstance(node, Op):
            if _compares_positions(node):
                narrow = self._compare_positions(node)
                if narrow is not None:
                    return narrow
            return apply(self.f, node.name, [self._value(a) for a in node.args], node.dtype)
        if isinstance(node, Load):
            return self._load(node)
        if isinstance(node, IndexValue):
            position = self._index_value(node.index)
            return apply(self.f, "cast", [position], node.dtype)
        if isinstance(node, Masked):
            return self._masked(node)
        raise NotImplementedError(type(node).__name__)

    def _masked(self, node: Masked) -> Value:
        condition = self._value(node.condition)
        self.guards.append(condition)
        self.frames.append({})
        body = self._value(node.body)
        self.frames.pop()
        self.guards.pop()
        return self.f.select(condition, body, self.f.constant(0, node.dtype))

    def _compare_positions(self, node: Op) -> Value | None:
        """A comparison of positions in 32 bits where the positions fit: half the registers."""
        sides = []
        for side in node.args:
            bounds = side.index.bounds if isinstance(side, IndexValue) else (int(side.value), int(side.value))  # type: ignore[attr-defined]
            if not -_INT32 <= bounds[0] <= bounds[1] < _INT32:
                return None
            if isinstance(side, IndexValue):
                sides.append(self._index_value(side.index, torch.int32))
            else:
                assert isinstance(side, Constant)
                sides.append(self.f.constant(int(side.value), torch.int32))
        lanes = max(s.lanes for s in sides)
        return compare(self.f, node.name, *(self.f.widen(s, lanes) for s in sides))

    # -- indices ----------------------------------------------------------------------------------------------

    def _varies(self, variables: frozenset[Var]) -> bool:
        """Whether something depends on the vector variable while several lanes are open."""
        return self.lanes > 1 and self.kernel.vector in variables

    def _index_value(self, index: Index, dtype: torch.dtype = torch.int64) -> Value:
        """An index as a value: one number, or one per lane."""
        if not self._varies(index.variables()):
            scalar = Value(self._scalar_index(index), torch.int64, 1)
            return scalar if dtype == torch.int64 else self._narrow(scalar)
        key = ("lanes", index, dtype, self.lanes)
        found = self._known(key)
        if found is None:
            found = self._vector_index(index, dtype)
            self.frames[-1][key] = found
        return found

    def _narrow(self, value: Value) -> Value:
        if not value.ref.startswith("%"):
            return Value(value.ref, torch.int32, 1)
        return self.f.make(f"trunc {value.operand} to {vector_type('i32', value.lanes)}", torch.int32, value.lanes)

    def _scalar_index(self, index: Index) -> str:
        """The value of an index at lane 0, inner terms added last so that outer sums are shared."""
        if not index.terms:
            return str(index.const)
        key = ("at", index)
        found = self._known(key)
        if found is not None:
            return found.ref
        deepest = max(self._level(m) for m in index.terms)
        inner = {m: c for m, c in index.terms.items() if self._level(m) == deepest}
        outer = {m: c for m, c in index.terms.items() if self._level(m) != deepest}
        total = self._scalar_index(Index(outer, index.const))
        for monomial, coefficient in inner.items():
            product = self._scalar_monomial(monomial)
            if coefficient != 1:
                product = self.f.fresh(f"mul nsw i64 {product}, {coefficient}")
            total = product if total == "0" else self.f.fresh(f"add nsw i64 {total}, {product}")
        self.frames[-1][key] = Value(total, torch.int64, 1)
        return total

    def _level(self, monomial: tuple[ix.Atom, ...]) -> int:
        return max((self.levels[v] for a in monomial for v in ix.atom_variables(a)), default=-1)

    def _scalar_monomial(self, monomial: tuple[ix.Atom, ...]) -> str:
        factors = [self._scalar_atom(a) for a in monomial]
        product = factors[0]
        for factor in factors[1:]:
            product = self.f.fresh(f"mul nsw i64 {product}, {factor}")
        return product

    def _scalar_atom(self, atom: ix.Atom) -> str:
        if isinstance(atom, Var):
            return self.variables[atom]
        if isinstance(atom, DataIndex):
            return self._checked_position(atom, self._value(atom.value)).ref
        numerator = Value(self._scalar_index(atom.numerator), torch.int64, 1)
        return self._divide_index(atom, numerator).ref

    def _divide_index(self, atom: Quotient | Remainder, numerator: Value) -> Value:
        divisor = self.f.constant(atom.divisor, numerator.dtype, numerator.lanes)
        if atom.numerator.bounds[0] >= 0:
            name = "udiv" if isinstance(atom, Quotient) else "urem"
            return self.f.make(f"{name} {numerator.operand}, {divisor.ref}", numerator.dtype, numerator.lanes)
        return apply(
            self.f, "floor_divide" if isinstance(atom, Quotient) else "remainder", [numerator, divisor], numerator.dtype
        )

    def _vector_index(self, index: Index, dtype: torch.dtype) -> Value:
        """An index in every lane, in ``dtype`` (int32 where the caller knows that it fits)."""
        f, lanes = self.f, self.lanes
        vector = self.kernel.vector
        assert vector is not None
        fixed = {m: c for m, c in index.terms.items() if not any(vector in ix.atom_variables(a) for a in m)}
        moving = {m: c for m, c in index.terms.items() if m not in fixed}
        base = Value(self._scalar_index(Index(fixed, index.const)), torch.int64, 1)
        total: Value | None = None
        for monomial, coefficient in moving.items():
            term: Value | None = None
            for atom in monomial:
                factor = self._vector_atom(atom, dtype)
                term = factor if term is None else apply(f, "mul", [term, factor], dtype)
            assert term is not None
            if coefficient != 1:
                term = apply(f, "mul", [term, f.constant(coefficient, dtype, lanes)], dtype)
            total = term if total is None else apply(f, "add", [total, term], dtype)
        assert total is not None
        if base.ref == "0":
            return total
        return apply(f, "add", [total, base if dtype == torch.int64 else self._narrow(base)], dtype)

    def _vector_atom(self, atom: ix.Atom, dtype: torch.dtype) -> Value:
        f, lanes = self.f, self.lanes
        if not self._varies(ix.atom_variables(atom)):
            scalar = Value(self._scalar_atom(atom), torch.int64, 1)
            return f.widen(scalar if dtype == torch.int64 else self._narrow(scalar), lanes)
        if isinstance(atom, Var):
            element = register_type(dtype)
            steps = ", ".join(f"{element} {k}" for k in range(lanes))
            start = Value(self.variables[atom], torch.int64, 1)
            start = start if dtype == torch.int64 else self._narrow(start)
            return apply(f, "add", [f.widen(start, lanes), Value(f"<{steps}>", dtype, lanes)], dtype)
        if isinstance(atom, DataIndex):
            found = self._checked_position(atom, self._value(atom.value))
            if dtype == torch.int64:
                return found
            return f.make(f"trunc {found.operand} to {vector_type('i32', lanes)}", torch.int32, lanes)
        return self._divide_index(atom, self._index_value(atom.numerator, dtype))

    def _checked_position(self, atom: DataIndex, position: Value) -> Value:
        """Wrap a negative position; report one out of range and replace it by 0, so that nothing wild is read."""
        f = self.f
        extent = f.constant(atom.extent, torch.int64, position.lanes)
        zero = f.constant(0, torch.int64, position.lanes)
        moved = apply(f, "add", [position, extent], torch.int64)
        wrapped = f.select(compare(f, "lt", position, zero), moved, position)
        if not atom.checked:
            return wrapped
        bad = f.make(f"icmp uge {wrapped.operand}, {extent.ref}", torch.bool, position.lanes)
        mask = self._mask(position.lanes)
        reported = bad if mask is None else f.make(f"and {bad.operand}, {mask}", torch.bool, position.lanes)
        # Guards may be wider than a scalar position: it counts when any lane uses it.
        for guard in self.guards:
            if guard.lanes > position.lanes:
                used = f.call("vector.reduce.or", [guard], torch.bool)
                reported = f.make(f"and i1 {reported.ref}, {used.ref}", torch.bool, 1)
        any_bad = self._any(reported)
        self._if(any_bad, lambda: f.emit(f"store i64 1, ptr {self.error_cell}"))
        return f.select(bad, zero, wrapped)

    def _any(self, condition: Value) -> str:
        if condition.lanes == 1:
            return condition.ref
        return self._reduce_vector("or", condition).ref

    # -- memory -------------------------------------------------------------------------------------------------

    def _mask(self, lanes: int) -> str | None:
        """Lanes that may touch memory: the active ones where every guard of this width holds; None for all."""
        f = self.f
        mask: str | None = None
        if lanes > 1 and self.active < lanes:
            flags = ", ".join("i1 true" if k < self.active else "i1 false" for k in range(lanes))
            mask = f"<{flags}>"
        for guard in self.guards:
            if guard.lanes > lanes:
                continue
            ref = f.widen(guard, lanes).ref
            mask = ref if mask is None else f.fresh(f"and {vector_type('i1', lanes)} {mask}, {ref}")
        return mask

    def _load(self, node: Load) -> Value:
        f = self.f
        offset = node.subscripts[0]
        base = self.pointers[node.buffer]
        element = memory_type(node.dtype)
        if not self._varies(node.variables):
            address = f.fresh(f"getelementptr inbounds {element}, ptr {base}, i64 {self._scalar_index(offset)}")
            address = self._guarded_address(address)
            raw = f.fresh(f"load {element}, ptr {address}, align {node.dtype.itemsize}")
            return self._from_memory(raw, node.dtype, 1)
        lanes = self.lanes
        assert self.kernel.vector is not None
        wide = vector_type(element, lanes)
        mask = self._mask(lanes)
        if offset.coefficient(self.kernel.vector) == 1:
            address = f.fresh(f"getelementptr inbounds {element}, ptr {base}, i64 {self._scalar_index(offset)}")
            if mask is None:
                raw = f.fresh(f"load {wide}, ptr {address}, align {node.dtype.itemsize}")
            else:
                raw = self._masked_call("load", wide, element, address, mask, lanes, node.dtype.itemsize)
            return self._from_memory(raw, node.dtype, lanes)
        addresses = self._lane_addresses(base, element, offset)
        flags = mask or splat_literal("i1", "true", lanes)
        symbol = f"@llvm.masked.gather.{suffix(element, lanes)}.v{lanes}p0"
        masks, pointers = vector_type("i1", lanes), vector_type("ptr", lanes)
        self.module.declare(f"declare {wide} {symbol}({pointers}, {masks}, {wide})")
        raw = f.fresh(
            f"call {wide} {symbol}({pointers} align {node.dtype.itemsize} {addresses}, {masks} {flags}, {wide} zeroinitializer)"
        )
        return self._from_memory(raw, node.dtype, lanes)

    def _masked_call(self, kind: str, wide: str, element: str, address: str, mask: str, lanes: int, align: int) -> str:
        symbol = f"@llvm.masked.{kind}.{suffix(element, lanes)}.p0"
        masks = vector_type("i1", lanes)
        self.module.declare(f"declare {wide} {symbol}(ptr, {masks}, {wide})")
        return self.f.fresh(
            f"call {wide} {symbol}(ptr align {align} {address}, {masks} {mask}, {wide} zeroinitializer)"
        )

    def _guarded_address(self, address: str) -> str:
        """A scalar load under a guard reads a spare cell where no lane needs it."""
        f = self.f
        for guard in self.guards:
            needed = self._any(guard)
            address = f.fresh(f"select i1 {needed}, ptr {address}, ptr {self.spare}")
        return address

    def _lane_addresses(self, base: str, element: str, offset: Index) -> str:
        """One address per lane: a common base and 32-bit lane offsets where they fit."""
        f, lanes = self.f, self.lanes
        low, high = offset.bounds
        dtype = torch.int32 if -_INT32 <= low <= high < _INT32 else torch.int64
        positions = self._index_value(offset, dtype)
        return f.fresh(
            f"getelementptr inbounds {element}, ptr {base}, {vector_type(register_type(dtype), lanes)} {positions.ref}"
        )

    def _from_memory(self, raw: str, dtype: torch.dtype, lanes: int) -> Value:
        if dtype != torch.bool:
            return Value(raw, dtype, lanes)
        type_ = vector_type("i8", lanes)
        return self.f.make(f"icmp ne {type_} {raw}, {splat_literal('i8', '0', lanes)}", torch.bool, lanes)

    def _store(self, store: Store, value: Value) -> None:
        f = self.f
        name = store.parameter if isinstance(store.parameter, str) else f"%{store.parameter}"
        base = self.pointers[name]
        dtype = value.dtype
        element = memory_type(dtype)
        align = dtype.itemsize
        vector = self.kernel.vector
        moves = self._varies(store.offset.variables())
        lanes = self.lanes if moves else 1
        if not moves and value.lanes > 1:
            value = Value(f.fresh(f"extractelement {value.operand}, i64 0"), dtype, 1)
        value = f.widen(value, lanes)
        if dtype == torch.bool:
            raw = f.fresh(f"zext {value.operand} to {vector_type('i8', lanes)}")
        else:
            raw = value.ref
        wide = vector_type(element, lanes)
        if not moves:
            address = f.fresh(f"getelementptr inbounds {element}, ptr {base}, i64 {self._scalar_index(store.offset)}")
            f.emit(f"store {wide} {raw}, ptr {address}, align {align}")
            return
        mask = self._mask(lanes)
        masks = vector_type("i1", lanes)
        assert vector is not None
        if store.offset.coefficient(vector) == 1:
            address = f.fresh(f"getelementptr inbounds {element}, ptr {base}, i64 {self._scalar_index(store.offset)}")
            if mask is None:
                f.emit(f"store {wide} {raw}, ptr {address}, align {align}")
            else:
                symbol = f"@llvm.masked.store.{suffix(element, lanes)}.p0"
                self.module.declare(f"declare void {symbol}({wide}, ptr, {masks})")
                f.emit(f"call void {symbol}({wide} {raw}, ptr align {align} {address}, {masks} {mask})")
            return
        addresses = self._lane_addresses(base, element, store.offset)
        pointers = vector_type("ptr", lanes)
        symbol = f"@llvm.masked.scatter.{suffix(element, lanes)}.v{lanes}p0"
        self.module.declare(f"declare void {symbol}({wide}, {pointers}, {masks})")
        flags = mask or splat_literal("i1", "true", lanes)
        f.emit(f"call void {symbol}({wide} {raw}, {pointers} align {align} {addresses}, {masks} {flags})")

    # -- reductions -----------------------------------------------------------------------------------------------

    def _accumulator(self, statement: Accumulate, widths: Sequence[int]) -> _Accumulator:
        f = self.f
        slots: list[tuple[str, str | None, int]] = []
        dtype = statement.value.dtype
        start = identity(statement.reducer, dtype)
        assert isinstance(start, Constant)
        for lanes in widths:
            initial = f.constant(start.value, dtype, lanes)
            slot = self._slot(initial.type)
            f.emit(f"store {initial.operand}, ptr {slot}")
            position: str | None = None
            if statement.reducer in _ORDERED_REDUCERS:
                unset = f.constant(torch.iinfo(torch.int64).max, torch.int64, lanes)
                position = self._slot(unset.type)
                f.emit(f"store {unset.operand}, ptr {position}")
            slots.append((slot, position, lanes))
        return _Accumulator(statement, slots)

    def _accumulate(self, accumulator: _Accumulator, value: Value) -> None:
        f, statement = self.f, accumulator.statement
        slot, position_slot, lanes = next(s for s in accumulator.slots if s[2] == self.lanes)
        value = f.widen(value, lanes)
        old = f.make(f"load {value.type}, ptr {slot}", value.dtype, lanes)
        row_vector = self.kernel.vector is not None and self.kernel.vector in self.kernel.rows
        inactive = lanes > 1 and self.active < lanes and not row_vector
        if position_slot is not None:
            self._accumulate_position(statement, value, old, slot, position_slot, inactive)
            return
        new = self._combine(statement.reducer, old, value)
        if inactive:
            flags = ", ".join("i1 true" if k < self.active else "i1 false" for k in range(lanes))
            new = f.select(Value(f"<{flags}>", torch.bool, lanes), new, old)
        f.emit(f"store {new.operand}, ptr {slot}")

    def _combine(self, reducer: str, left: Value, right: Value) -> Value:
        name = {
            "sum": "add",
            "prod": "mul",
            "max": "maximum",
            "min": "minimum",
            "any": "logical_or",
            "all": "logical_and",
        }[reducer]
        return apply(self.f, name, [left, right], left.dtype)

    def _accumulate_position(
        self, statement: Accumulate, value: Value, old: Value, slot: str, position_slot: str, inactive: bool
    ) -> None:
        """Keep the first extremum: NaN counts as the most extreme value, as in eager."""
        f, lanes = self.f, value.lanes
        positions = f.widen(self._index_value(statement.position), lanes)
        known = f.make(f"load {positions.type}, ptr {position_slot}", torch.int64, lanes)
        unset = f.constant(torch.iinfo(torch.int64).max, torch.int64, lanes)
        better = compare(f, "gt" if statement.reducer == "argmax" else "lt", value, old)
        first = compare(f, "eq", known, unset)
        better = f.make(f"or {better.operand}, {first.ref}", torch.bool, lanes)
        if value.dtype.is_floating_point:
            is_nan = apply(f, "isnan", [value], torch.bool)
            was_number = f.make(f"fcmp ord {old.operand}, {old.ref}", torch.bool, lanes)
            fresh_nan = f.make(f"and {is_nan.operand}, {was_number.ref}", torch.bool, lanes)
            better = f.make(f"or {better.operand}, {fresh_nan.ref}", torch.bool, lanes)
        if inactive:
            flags = ", ".join("i1 true" if k < self.active else "i1 false" for k in range(lanes))
            better = f.make(f"and {better.operand}, <{flags}>", torch.bool, lanes)
        f.emit(f"store {f.select(better, value, old).operand}, ptr {slot}")
        f.emit(f"store {f.select(better, positions, known).operand}, ptr {position_slot}")

    def _finish(self, accumulator: _Accumulator, *, horizontal: bool) -> Value:
        """The result of a reduction: lanes folded together where the vector runs along the reduced axis."""
        f, statement = self.f, accumulator.statement
        dtype = statement.value.dtype
        if not horizontal:
            slot, position_slot, lanes = accumulator.slots[0]
            if position_slot is not None:
                return f.make(f"load {vector_type('i64', lanes)}, ptr {position_slot}", torch.int64, lanes)
            return f.make(f"load {vector_type(register_type(dtype), lanes)}, ptr {slot}", dtype, lanes)
        results: list[tuple[Value, Value | None]] = []
        for slot, position_slot, lanes in accumulator.slots:
            value = f.make(f"load {vector_type(register_type(dtype), lanes)}, ptr {slot}", dtype, lanes)
            if position_slot is None:
                results.append((self._fold(statement.reducer, value), None))
                continue
            positions = f.make(f"load {vector_type('i64', lanes)}, ptr {position_slot}", torch.int64, lanes)
            results.append(self._fold_position(statement.reducer, value, positions))
        total, place = results[0]
        for value, position in results[1:]:
            if place is None or position is None:
                total = self._combine(statement.reducer, total, value)
            else:
                total, place = self._fold_pair(statement.reducer, (total, place), (value, position))
        return total if place is None else place

    def _fold(self, reducer: str, value: Value) -> Value:
        if value.lanes == 1:
            return value
        dtype = value.dtype
        if dtype.is_floating_point:
            if reducer in ("sum", "prod"):
                name = "fadd" if reducer == "sum" else "fmul"
                start = self.f.constant(-0.0 if reducer == "sum" else 1.0, dtype)
                return self._reduce_vector(name, value, start)
            return self._reduce_vector("fmaximum" if reducer == "max" else "fminimum", value)
        signed = "u" if dtype == torch.uint8 else "s"
        name = {"sum": "add", "prod": "mul", "max": f"{signed}max", "min": f"{signed}min", "any": "or", "all": "and"}[
            reducer
        ]
        return self._reduce_vector(name, value)

    def _reduce_vector(self, name: str, value: Value, start: Value | None = None) -> Value:
        element = register_type(value.dtype)
        symbol = f"@llvm.vector.reduce.{name}.{suffix(element, value.lanes)}"
        if start is None:
            self.module.declare(f"declare {element} {symbol}({value.type})")
            return self.f.make(f"call {element} {symbol}({value.operand})", value.dtype, 1)
        self.module.declare(f"declare {element} {symbol}({element}, {value.type})")
        return self.f.make(f"call reassoc {element} {symbol}({start.operand}, {value.operand})", value.dtype, 1)

    def _fold_position(self, reducer: str, value: Value, positions: Value) -> tuple[Value, Value]:
        """Best value over the lanes and the smallest position that attains it."""
        if value.lanes == 1:
            return value, positions
        f = self.f
        unset = f.constant(torch.iinfo(torch.int64).max, torch.int64, value.lanes)
        # Lanes that saw nothing hold the identity, which may equal a real value: they must not count.
        best = self._fold(_ORDERED_REDUCERS[reducer], value)
        wide = f.widen(best, value.lanes)
        here = compare(f, "eq", value, wide)
        if value.dtype.is_floating_point:
            both = f.make(f"fcmp uno {value.operand}, {value.ref}", torch.bool, value.lanes)
            here = f.make(f"or {here.operand}, {both.ref}", torch.bool, value.lanes)
        candidates = f.select(here, positions, unset)
        return best, self._reduce_vector("smin", candidates)

    def _fold_pair(self, reducer: str, left: tuple[Value, Value], right: tuple[Value, Value]) -> tuple[Value, Value]:
        f = self.f
        best = self._combine(_ORDERED_REDUCERS[reducer], left[0], right[0])
        places = []
        for value, position in (left, right):
            here = compare(f, "eq", value, best)
            if value.dtype.is_floating_point:
                here = f.make(f"or {here.operand}, {apply(f, 'isnan', [value], torch.bool).ref}", torch.bool, 1)
            places.append(f.select(here, position, f.constant(torch.iinfo(torch.int64).max, torch.int64)))
        return best, apply(f, "minimum", places, torch.int64)


def _reads(monomial: tuple[ix.Atom, ...]) -> bool:
    """Whether a term needs a value from memory (which may be guarded, so it is not moved out of its place)."""
    return any(
        isinstance(a, DataIndex)
        or (isinstance(a, Quotient | Remainder) and any(_reads((b,)) for b in a.numerator.atoms()))
        for a in monomial
    )
