"""Evaluation of expressions at one point of a kernel: values, indices, loads and stores, on scalars or lanes.

A value is emitted once per scope. What does not depend on the vector variable stays a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from torchkiln.codegen.llvm.instructions import (
    suffix,
    vector_type,
)
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import (
    Instructions,
    Value,
    apply,
    compare,
    divide_integers,
    register_type,
)
from torchkiln.codegen.llvm.random import Place, draw, elements_per_block
from torchkiln.ir import index as ix
from torchkiln.ir import ops
from torchkiln.ir.expr import Constant, Expr, FlatLoad, IndexValue, KernelMemory, Masked, Op, Reduced, compares_indices
from torchkiln.ir.index import DataIndex, Extent, Index, Quotient, Remainder, Size, Var

_INT32 = 1 << 31
_DEEP = 256  # nodes above which an expression is computed from its leaves up
# Of the few lanes whose numbers would not fill 128 bits as bytes.
_DTYPE_OF_LANE_NUMBERS = {2: torch.int64, 4: torch.int32, 8: torch.int16}


# Comparisons with zero of what grows along the lanes: whether they hold from some lane on (else before it), and whether
# that lane is the one after zero.
_FIRST_LANES = {"ge": (True, False), "gt": (True, True), "lt": (False, False), "le": (False, True)}
# Bits of the vectors from which on masks have registers of their own: AVX-512.
_CHEAP_MASKS = 512
_FAR = 1 << 62


def _index_of(value: Expr) -> Index:
    assert isinstance(value, IndexValue)
    return value.index


def fits_int32(index: Index) -> bool:
    """Whether an index can be computed in 32 bits: sums may wrap on the way, but what is divided must fit."""
    low, high = index.bounds
    return -_INT32 <= low <= high < _INT32 and all(
        fits_int32(atom.numerator) and ix.bounds_of(atom.divisor)[1] < _INT32
        for atom in index.atoms()
        if isinstance(atom, Quotient | Remainder)
    )


class Evaluator:
    """The state of a function being written: open scopes, loop variables, active lanes, guards.

    While ``lanes`` is above 1, as many values of the variable ``vector`` are computed at once. The first ``active`` of
    them, a number or an operand, may touch memory.
    """

    def __init__(self, module: ModuleBuilder, vector: Var | None, order: tuple[Var, ...]) -> None:
        self.module = module
        self.f = Instructions(module)
        self.vector = vector
        self.lanes = 1
        self.active: int | str = 1
        self.sizes: dict[Size, str] = {}
        self.slots: list[str] = []
        self.frames: list[dict[object, Value]] = [{}]
        self.guards: list[Value] = []
        self.variables: dict[Var, str] = {}
        self.reduced: dict[str, Value] = {}
        self.pointers: dict[KernelMemory, str] = {}
        self.spare = ""
        self.alignment = 1  # the vector variable is at a multiple of this in lane 0
        self.levels = {v: k for k, v in enumerate(order)}

    # -- scopes and loops -------------------------------------------------------------------------------------

    def _slot(self, type_: str) -> str:
        """Stack memory of the function, allocated once on entry."""
        name = f"%slot{len(self.slots)}"
        self.slots.append(f"{name} = alloca {type_}, align 64")
        return name

    @contextmanager
    def _scope(self, known: Mapping[object, Value] | None = None) -> Iterator[None]:
        """What is computed inside is not known after it; ``known`` is to begin with."""
        self.frames.append(dict(known or {}))
        yield
        self.frames.pop()

    @contextmanager
    def _loop(self, start: str, stop: str, step: int = 1) -> Iterator[str]:
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
        with self._scope():
            yield current
        following = f.fresh(f"add nsw i64 {current}, {step}")
        f.emit(f"store i64 {following}, ptr {counter}")
        f.branch(head)
        f.start_block(done)

    def _if(self, condition: str, body: Callable[[], None], otherwise: Callable[[], None] | None = None) -> None:
        f = self.f
        inside, done = f.new_label("then"), f.new_label("after")
        other = done if otherwise is None else f.new_label("else")
        f.emit(f"br i1 {condition}, label %{inside}, label %{other}")
        for label, branch in ((inside, body), (other, otherwise)):
            if branch is not None:
                f.start_block(label)
                with self._scope():
                    branch()
                f.branch(done)
        f.start_block(done)

    @contextmanager
    def _open_lanes(self, lanes: int, active: int | str, position: str) -> Iterator[None]:
        """Around what is computed in lanes, the first of them at ``position`` of the vector variable."""
        saved = self.lanes, self.active
        self.lanes, self.active = lanes, active
        assert self.vector is not None
        self.variables[self.vector] = position
        yield
        self.lanes, self.active = saved

    # -- values ---------------------------------------------------------------------------------------------

    def _known(self, key: object) -> Value | None:
        for frame in reversed(self.frames):
            found = frame.get(key)
            if found is not None and found.lanes in (1, self.lanes):
                return found
        return None

    def _once(self, key: object, compute: Callable[[], Value]) -> Value:
        """The value that is known as ``key``, computed where it is not."""
        found = self._known(key)
        if found is None:
            found = compute()
            self.frames[-1][key] = found
        return found

    def _value(self, node: Expr) -> Value:
        if isinstance(node, Reduced):
            return self.reduced[node.name]
        if isinstance(node, Constant):
            return self.f.constant(node.value, node.dtype)
        return self._once(node, lambda: self._compute(node))

    def _operands_first(self, root: Expr) -> None:
        """Compute what ``root`` needs from the leaves up, so that a long chain does not need a deep stack."""
        stack: list[tuple[Expr, bool]] = [(root, False)]
        seen: set[Expr] = set()
        while stack:
            node, ready = stack.pop()
            if ready:
                if node is not root:
                    self._value(node)
                continue
            if node in seen or not isinstance(node, Op | FlatLoad) or self._known(node) is not None:
                continue
            seen.add(node)
            stack.append((node, True))
            stack.extend((operand, False) for operand in reversed(node.operands))

    def _compute(self, node: Expr) -> Value:
        if node.size > _DEEP:
            self._operands_first(node)
        if isinstance(node, Op):
            if compares_indices(node):
                narrow = self._compare_indices(node)
                if narrow is not None:
                    return narrow
            if node.name in ops.RANDOM:
                return self._random(node)
            return apply(self.f, node.name, [self._value(a) for a in node.args], node.dtype)
        if isinstance(node, FlatLoad):
            return self._load(node)
        if isinstance(node, IndexValue):
            return apply(self.f, "cast", [self._index_value(node.index)], node.dtype)
        if isinstance(node, Masked):
            return self._masked(node)
        raise NotImplementedError(type(node).__name__)

    def _masked(self, node: Masked) -> Value:
        condition = self._value(node.condition)
        self.guards.append(condition)
        with self._scope():
            body = self._value(node.body)
        self.guards.pop()
        return self.f.select(condition, body, self.f.constant(0, node.dtype))

    def _compare_indices(self, node: Op) -> Value | None:
        """A comparison of indices in 32 bits where they fit: half the registers."""
        if self._varies(node.variables) and self.module.target.vector_bits == _CHEAP_MASKS:
            found = self._lanes_compared(node)
            if found is not None:
                return found
        sides = []
        for side in node.args:
            if isinstance(side, IndexValue):
                if not fits_int32(side.index):
                    return None
                sides.append(self._index_value(side.index, torch.int32))
            else:
                assert isinstance(side, Constant)
                if not -_INT32 <= side.value < _INT32:
                    return None
                sides.append(self.f.constant(int(side.value), torch.int32))
        lanes = max(s.lanes for s in sides)
        return compare(self.f, node.name, *(self.f.widen(s, lanes) for s in sides))

    def _lanes_compared(self, node: Op) -> Value | None:
        """A comparison that holds up to some lane, or from one on: that number beside those of the lanes, as bytes.

        (Padding 8 x 64 x 56 x 56 of symbolic sizes by its reflection, one thread of a Zen 4, as multiples of eager's
        time: 2.1 by numbers of 64 bits, 1.7 so.)
        """
        f, lanes = self.f, self.lanes
        assert self.vector is not None
        left, right = (ix.constant(int(s.value)) if isinstance(s, Constant) else _index_of(s) for s in node.args)
        distance = left - right
        stride = distance.coefficient(self.vector)
        if stride not in (1, -1) or node.name not in _FIRST_LANES or abs(distance.const) >= _FAR:
            return None
        # Lane k is at distance + k, or distance - k.
        from_there, after = _FIRST_LANES[node.name]
        here = self._scalar_index(distance)
        if stride == 1:
            here = f.fresh(f"sub i64 0, {here}")
        else:
            from_there, after = not from_there, not after
        first = Value(f.fresh(f"add i64 {here}, 1") if after else here, torch.int64, 1)
        for name, end in (("smax", 0), ("smin", lanes)):
            first = f.intrinsic(name, [first, f.constant(end, torch.int64)], torch.int64)
        dtype = _DTYPE_OF_LANE_NUMBERS.get(lanes, torch.uint8)
        number = register_type(dtype)
        if dtype != torch.int64:
            first = Value(f.fresh(f"trunc {first.operand} to {number}"), dtype, 1)
        limit = f.widen(first, lanes)
        numbers = f"<{', '.join(f'{number} {k}' for k in range(lanes))}>"
        return f.make(f"icmp {'ule' if from_there else 'ugt'} {limit.operand}, {numbers}", torch.bool, lanes)

    def _random(self, node: Op) -> Value:
        seed, stream, element, *more = node.args
        assert isinstance(element, IndexValue)
        index = element.index
        operands = [self._value(operand) for operand in (seed, stream, *more)]
        if not self._varies(index.variables()):
            place = Place(self._first_index(index), 1, neighbours=False)
        elif self._begins_with_multiple(index, elements_per_block(node.dtype)):
            place = Place(self._first_index(index), self.lanes, neighbours=True)
        else:
            dtype = torch.int32 if fits_int32(index) else torch.int64
            place = Place(self._index_value(index, dtype), self.lanes, neighbours=False)
        return draw(self.f, node.name, operands, place, node.dtype)

    def _begins_with_multiple(self, index: Index, divisor: int) -> bool:
        """Whether the lanes are neighbours in ``index`` and lane 0 is at a multiple of ``divisor``."""
        assert self.vector is not None
        if index.coefficient(self.vector) != 1 or self.lanes % divisor or self.alignment % divisor:
            return False
        others = [c for m, c in index.terms.items() if m != (self.vector,)]
        return all(c % divisor == 0 for c in (*others, index.const))

    # -- indices ----------------------------------------------------------------------------------------------

    def _varies(self, variables: frozenset[Var]) -> bool:
        """Whether something depends on the vector variable while several lanes are open."""
        return self.lanes > 1 and self.vector in variables

    def _index_value(self, index: Index, dtype: torch.dtype = torch.int64) -> Value:
        """An index as a value: one number, or one per lane."""
        if not self._varies(index.variables()):
            return self._in_width(self._first_index(index), dtype)
        return self._once(("lanes", index, dtype, self.lanes), lambda: self._vector_index(index, dtype))

    def _in_width(self, value: Value, dtype: torch.dtype) -> Value:
        """An int64 as ``dtype``, which is that or int32."""
        if dtype == torch.int64:
            return value
        if value.lanes == 1 and value.is_constant:
            return Value(value.ref, torch.int32, 1)
        return self.f.make(f"trunc {value.operand} to {vector_type('i32', value.lanes)}", torch.int32, value.lanes)

    def _first_index(self, index: Index) -> Value:
        return Value(self._scalar_index(index), torch.int64, 1)

    def _scalar_index(self, index: Index) -> str:
        """The value of an index at lane 0, inner terms added last so that outer sums are shared."""
        if not index.terms:
            return str(index.const)
        return self._once(("at", index), lambda: self._sum_of_terms(index)).ref

    def _sum_of_terms(self, index: Index) -> Value:
        deepest = max(self._level(m) for m in index.terms)
        inner = {m: c for m, c in index.terms.items() if self._level(m) == deepest}
        outer = {m: c for m, c in index.terms.items() if self._level(m) != deepest}
        total = self._scalar_index(Index(outer, index.const))
        for monomial, coefficient in inner.items():
            product = self._scalar_monomial(monomial)
            if coefficient != 1:
                product = self.f.fresh(f"mul nsw i64 {product}, {coefficient}")
            total = product if total == "0" else self.f.fresh(f"add nsw i64 {total}, {product}")
        return Value(total, torch.int64, 1)

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
        if isinstance(atom, Size):
            return self.sizes[atom]
        if isinstance(atom, DataIndex):
            return self._checked_index(atom).ref
        return self._divide_index(atom, self._first_index(atom.numerator)).ref

    def _divide_index(self, atom: Quotient | Remainder, numerator: Value) -> Value:
        divisor = self.f.widen(self._in_width(self._divisor(atom.divisor), numerator.dtype), numerator.lanes)
        is_quotient = isinstance(atom, Quotient)
        if atom.numerator.bounds[0] >= 0:
            return self.f.binary("udiv" if is_quotient else "urem", numerator, divisor)
        return divide_integers(self.f, "floor_divide" if is_quotient else "remainder", numerator, divisor)

    def _extent(self, extent: Extent) -> str:
        """An i64 operand holding an extent."""
        return str(extent) if isinstance(extent, int) else self._scalar_index(extent)

    def _divisor(self, extent: Extent) -> Value:
        """A divisor, which is never 0: that of an empty dimension divides nothing, but may stand before its loop."""
        if isinstance(extent, int):
            return self.f.constant(extent, torch.int64)
        one = self.f.constant(1, torch.int64)
        return self._once(
            ("divisor", extent), lambda: self.f.intrinsic("umax", [self._first_index(extent), one], torch.int64)
        )

    def _vector_index(self, index: Index, dtype: torch.dtype) -> Value:
        """An index in every lane, in ``dtype`` (int32 where the caller knows that it fits)."""
        f, lanes = self.f, self.lanes
        fixed = {m: c for m, c in index.terms.items() if not any(self.vector in ix.atom_variables(a) for a in m)}
        moving = {m: c for m, c in index.terms.items() if m not in fixed}
        base = self._first_index(Index(fixed, index.const))
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
        return apply(f, "add", [total, self._in_width(base, dtype)], dtype)

    def _vector_atom(self, atom: ix.Atom, dtype: torch.dtype) -> Value:
        f, lanes = self.f, self.lanes
        if not self._varies(ix.atom_variables(atom)):
            return f.widen(self._in_width(Value(self._scalar_atom(atom), torch.int64, 1), dtype), lanes)
        if isinstance(atom, Var):
            element = register_type(dtype)
            steps = ", ".join(f"{element} {k}" for k in range(lanes))
            start = self._in_width(Value(self.variables[atom], torch.int64, 1), dtype)
            return apply(f, "add", [f.widen(start, lanes), Value(f"<{steps}>", dtype, lanes)], dtype)
        if isinstance(atom, DataIndex):
            return self._in_width(self._checked_index(atom), dtype)
        assert isinstance(atom, Quotient | Remainder)
        return self._divide_index(atom, self._index_value(atom.numerator, dtype))

    def _checked_index(self, atom: DataIndex) -> Value:
        """Wrap a negative index; one out of range becomes 0, and a check (``native_operators.CHECK``) reports it."""
        f, index = self.f, self._value(atom.value)
        extent = f.widen(Value(self._extent(atom.extent), torch.int64, 1), index.lanes)
        zero = f.constant(0, torch.int64, index.lanes)
        if atom.wraps:
            moved = apply(f, "add", [index, extent], torch.int64)
            index = f.select(compare(f, "lt", index, zero), moved, index)
        if not atom.checked:
            return index
        bad = f.make(f"icmp uge {index.operand}, {extent.ref}", torch.bool, index.lanes)
        return f.select(bad, zero, index)

    def _any(self, condition: Value) -> str:
        if condition.lanes == 1:
            return condition.ref
        return self._reduce_vector("or", condition).ref

    # -- lanes --------------------------------------------------------------------------------------------------

    def _mask(self, lanes: int) -> str | None:
        """Lanes that may touch memory: the active ones where every guard of this width holds; None for all."""
        f = self.f
        mask = self._active_lanes(lanes) if lanes > 1 else None
        for guard in self.guards:
            if guard.lanes > lanes:
                continue
            ref = f.widen(guard, lanes).ref
            mask = ref if mask is None else f.fresh(f"and {vector_type('i1', lanes)} {mask}, {ref}")
        return mask

    def _active_lanes(self, lanes: int) -> str | None:
        """The lanes before the end of the vector variable as a mask; None for all."""
        active = self.active
        if isinstance(active, int):
            flags = ", ".join("i1 true" if k < active else "i1 false" for k in range(lanes))
            return f"<{flags}>" if active < lanes else None
        return self._once(("active", active, lanes), lambda: self._lanes_below(active, lanes)).ref

    def _lanes_below(self, count: str, lanes: int, *, reverse: bool = False) -> Value:
        """A mask of the first ``count`` lanes, or with ``reverse`` of the last."""
        # Up to 64 lanes: their numbers fit a byte, and 64 bytes one register. Two things are kept from LLVM 22, whose
        # masked stores for AVX-512 write beyond the mask then:
        # - A comparison shorter than a register. It is rounded up to one, and where the mask is kept across a call the
        #   lanes added are not cleared, and a store of bytes writes them. Few lanes compare wider numbers.
        # - A mask known to be of one lane. Its store of truncated numbers writes an untruncated one, so the count
        #   passes through assembly that LLVM does not look into. Counts known here are over half of the lanes.
        dtype = _DTYPE_OF_LANE_NUMBERS.get(lanes, torch.uint8)
        number = register_type(dtype)
        count = self.f.fresh(f'call i64 asm "", "=r,0"(i64 {count})')
        if dtype != torch.int64:
            count = self.f.fresh(f"trunc i64 {count} to {number}")
        limit = self.f.widen(Value(count, dtype, 1), lanes)
        steps = ", ".join(f"{number} {k}" for k in (reversed(range(lanes)) if reverse else range(lanes)))
        return self.f.make(f"icmp ugt {limit.operand}, <{steps}>", torch.bool, lanes)

    def _reduce_vector(self, name: str, value: Value, start: Value | None = None, flags: str = "") -> Value:
        """All lanes folded into one by ``llvm.vector.reduce.<name>``."""
        element = register_type(value.dtype)
        symbol = f"@llvm.vector.reduce.{name}.{suffix(element, value.lanes)}"
        if start is None:
            self.module.declare(f"declare {element} {symbol}({value.type})")
            return self.f.make(f"call {flags}{element} {symbol}({value.operand})", value.dtype, 1)
        self.module.declare(f"declare {element} {symbol}({element}, {value.type})")
        return self.f.make(f"call reassoc {element} {symbol}({start.operand}, {value.operand})", value.dtype, 1)

    def _load(self, node: FlatLoad) -> Value:
        """The element, or those of the lanes (:mod:`torchkiln.codegen.llvm.accesses`)."""
        raise NotImplementedError
