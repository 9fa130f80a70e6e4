"""Sizes in torch's terms and in the IR's: integers, or expressions of symbols whose values come with the inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv, is_nested_int
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from torchkiln.errors import UnsupportedError
from torchkiln.graph.fake import TYPICAL_SIZE, symbol_examples
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue, index_value, op, where
from torchkiln.ir.index import Extent, Index, Quotient, Remainder, Size
from torchkiln.ir.ops import COMPARISONS
from torchkiln.ir.program import TOO_LARGE, Refusal

# Integers are 64 bits wide at run time.
_LEAST, _MOST = -(2**63), 2**63 - 1
_RELATIONS = {getattr(sympy, name.capitalize()): name for name in sorted(COMPARISONS)}  # sympy.Lt is a < b
_LOGIC = {sympy.And: operator.and_, sympy.Or: operator.or_}
_BITWISE = {f"BitwiseFn_{name}": name for name in ("bitwise_and", "bitwise_or", "bitwise_xor")}
_CHOICES = (Min, Max, sympy.Piecewise)


class Sizes:
    """Converts the sizes of one graph, and remembers where each symbol's value is found.

    A size that is a choice (the smaller of two, one by a condition) is no index: ``emit`` makes the graph compute it,
    and it is a size of its own from there on.
    """

    def __init__(self, emit: Callable[[Expr, Size, Refusal | None], None]) -> None:
        self._symbols: dict[sympy.Symbol, Size] = {}
        self._known: dict[tuple[sympy.Expr, bool], Index] = {}
        self._found: dict[Size, None] = {}  # in order
        self._emit = emit
        self._from_inputs: frozenset[Size] | None = None
        self._computed: dict[Expr, Index] = {}
        self.numbers: set[Size] = set()
        """Numbers that are given or read from tensors, of any sign, and need be no size of anything."""

    def extents(self, sizes: Sequence[Any]) -> tuple[Extent, ...]:
        return tuple(self.extent(size) for size in sizes)

    def strides(self, strides: Sequence[Any]) -> tuple[Extent, ...]:
        """Strides as extents. torch counts an empty dimension as 1 in them; where that shows there is no element."""
        return tuple(self.extent(stride, of_stride=True) for stride in strides)

    def extent(self, size: Any, *, of_stride: bool = False) -> Extent:
        """An ``int`` or ``torch.SymInt`` as an extent."""
        if not isinstance(size, torch.SymInt):
            return operator.index(size)
        node = size.node
        if is_nested_int(size):
            raise UnsupportedError(f"the ragged dimension {size} of a nested tensor, used as a number")
        if node.is_constant():
            return int(node.maybe_as_int())
        return ix.extent(self._index(node.expr, node.shape_env, of_stride))

    def decide(self, extent: Extent) -> Size | None:
        """The symbol that ``extent`` is, where its value was not known before this; from here on it is."""
        found = None if isinstance(extent, int) else ix.single_atom(extent)
        if not isinstance(found, Size) or found in self._found:
            return None
        self._found[found] = None
        return found

    def given(self, size: Any) -> Size | None:
        """The symbol that ``size``, a size of an input or a number given, tells the value of; None if it tells none.

        One that is a choice, as saved values of a forward have, is a size of its own: what it is made of need not be
        known.
        """
        expr = size.node.expr if isinstance(size, torch.SymInt) and not is_nested_int(size) else None
        if not isinstance(expr, _CHOICES):
            return self.decide(self.extent(size))
        if (expr, False) in self._known:
            return None
        limits = size.node.shape_env.bound_sympy(expr)
        low, high = _limits(limits)
        found = Size(f"g{len(self._found)}", low, high, min(max(TYPICAL_SIZE, low), high))
        self._found[found] = None
        self._known[expr, False] = self._known[expr, True] = ix.of(found)
        return found

    def inputs_are_known(self) -> None:
        """Every size of the inputs has been converted: from here on sizes can be computed."""
        self._from_inputs = frozenset(self._found)

    def from_data(self, *extents: Extent) -> bool:
        """Whether a size depends on more than the inputs' sizes, so that no guard of torch's vouches for it."""
        return any(not ix.sizes_in(e) <= (self._from_inputs or frozenset()) for e in extents)

    def compute(self, value: Expr, low: int, high: int, hint: int, refusal: Refusal | None = None) -> Index:
        """``value``, an integer from ``low`` to ``high``, as a size that the graph computes here."""
        if isinstance(value, IndexValue):
            return value.index
        if isinstance(value, Constant):
            return ix.constant(int(value.value))
        if value in self._computed:
            return self._computed[value]
        used = (ix.sizes_in(node.index) for node in ex.walk((value,)) if isinstance(node, IndexValue))
        if self._from_inputs is None or not frozenset().union(*used) <= self._found.keys():
            raise UnsupportedError(f"the size {value}, before everything it is made of is known")
        size = Size(f"n{len(self._computed)}", max(low, _LEAST), min(high, _MOST), hint)
        self._found[size] = None
        self._emit(ex.cast(value, torch.int64), size, refusal)
        self._computed[value] = ix.of(size)
        return self._computed[value]

    def of_condition(self, condition: Expr) -> Index:
        """1 where ``condition`` holds, else 0."""
        return self.compute(condition, 0, 1, 1)

    def mark(self) -> tuple[int, int]:
        """What is known so far, for :meth:`rollback`."""
        return len(self._found), len(self._computed)

    def rollback(self, mark: tuple[int, int]) -> None:
        """Forget the sizes that became known since: what gave them is gone."""
        found, computed = mark
        lost = frozenset(list(self._found)[found:])
        if lost:
            self._found = {size: None for size in self._found if size not in lost}
            self._known = {key: index for key, index in self._known.items() if not ix.sizes_in(index) & lost}
            self._computed = dict(list(self._computed.items())[:computed])

    def require_found(self) -> None:
        """Raise where a symbol was used whose value no input gives."""
        missing = [size for size in self._symbols.values() if size not in self._found]
        if missing:
            raise UnsupportedError(f"the size {missing[0]}, which no input of the graph tells")

    def _index(self, expr: sympy.Expr, env: ShapeEnv, of_stride: bool) -> Index:
        found = self._known.get((expr, of_stride))
        if found is None:
            found = self._convert(expr, env, of_stride)
            self._known[expr, of_stride] = found
        return found

    def _convert(self, expr: sympy.Expr, env: ShapeEnv, of_stride: bool) -> Index:
        if expr.is_Integer:
            return ix.constant(int(expr))
        if expr.is_Symbol:
            return ix.of(self._size(expr, env))
        linear = expr.is_Add or expr.is_Mul or isinstance(expr, (FloorDiv, CleanDiv, Mod, PythonMod))
        parts = [self._index(part, env, of_stride) for part in expr.args] if linear else []
        if expr.is_Add:
            return sum(parts, ix.ZERO)
        if expr.is_Mul:
            return math.prod(parts, start=ix.constant(1))
        if expr.is_Pow and expr.exp.is_Integer and 0 < int(expr.exp) <= 8:
            return math.prod([self._index(expr.base, env, of_stride)] * int(expr.exp), start=ix.constant(1))
        if isinstance(expr, (FloorDiv, CleanDiv)):
            return parts[0] // ix.extent(parts[1]) if _positive(parts[1]) else self._divided("floor_divide", *parts)
        if isinstance(expr, (Mod, PythonMod)):
            return parts[0] % ix.extent(parts[1]) if _positive(parts[1]) else self._divided("remainder", *parts)
        if isinstance(expr, sympy.Abs):
            return self._absolute(self._index(expr.args[0], env, of_stride))
        bitwise = _BITWISE.get(type(expr).__name__)
        if bitwise is not None:
            values = (index_value(self._index(part, env, of_stride)) for part in expr.args)
            return self.compute(op(bitwise, *values), _LEAST, _MOST, 0)
        if of_stride and isinstance(expr, Max) and sympy.S.One in expr.args:
            return self._index(Max(*(part for part in expr.args if part != 1)), env, of_stride)
        if isinstance(expr, _CHOICES):
            return self._choice(expr, env, of_stride)
        raise UnsupportedError(f"the size {expr}")

    def _divided(self, name: str, left: Index, right: Index) -> Index:
        """A quotient rounded down, or its remainder, by a divisor of any sign, as Python has them, errors and all."""
        dividend, divisor = index_value(left), index_value(right)
        if right.bounds[0] <= 0 <= right.bounds[1]:
            self._refuse(divisor.eq(0), Refusal("ZeroDivisionError", "integer division or modulo by zero"))
        # The processor's division stops the program at these two, and at the lowest number divided by -1.
        found = op(name, dividend, where(divisor.eq(0) | divisor.eq(-1), 1, divisor))
        if name == "remainder":
            low, high = min(right.bounds[0] + 1, 0), max(right.bounds[1] - 1, 0)
            return self.compute(where(divisor.eq(-1), 0, found), low, high, 0)
        if left.bounds[0] <= _LEAST and right.bounds[0] <= -1 <= right.bounds[1]:
            self._refuse(divisor.eq(-1) & dividend.eq(_LEAST), TOO_LARGE)
        most = max(abs(bound) for bound in left.bounds)
        return self.compute(where(divisor.eq(-1), -dividend, found), -most, most, 0)

    def _absolute(self, index: Index) -> Index:
        value = index_value(index)
        if index.bounds[0] <= _LEAST:
            self._refuse(value.eq(_LEAST), TOO_LARGE)
        most = max(abs(bound) for bound in index.bounds)
        return self.compute(op("abs", value), 0, most, min(most, TYPICAL_SIZE))

    def truncated(self, number: torch.SymInt, value: Expr) -> Index:
        """``number``, which is the float ``value`` without its fraction, as Python makes it an integer."""
        self._refuse(op("isnan", value), Refusal("ValueError", "cannot convert float NaN to integer"))
        inside = (value >= float(_LEAST)) & (value < -float(_LEAST))
        self._refuse(~inside, TOO_LARGE)
        found = self.compute(ex.cast(value, torch.int64), _LEAST, _MOST, TYPICAL_SIZE)
        self._known[number.node.expr, False] = found
        return found

    def _refuse(self, condition: Expr, refusal: Refusal) -> None:
        """Raise where ``condition`` holds when the graph gets here."""
        self.compute(condition, 0, 0, 0, refusal)

    def may_wrap(self, extent: Extent) -> bool:
        """Whether arithmetic on numbers that are no sizes may need more than 64 bits."""
        if isinstance(extent, int) or ix.sizes_in(extent).isdisjoint(self.numbers):
            return False
        low, high = extent.bounds
        divided = any(isinstance(atom, (Quotient, Remainder)) for monomial in extent.terms for atom in monomial)
        return low < _LEAST or high > _MOST or divided

    def _choice(self, expr: sympy.Expr, env: ShapeEnv, of_stride: bool) -> Index:
        """The smallest or largest of several numbers, or the first whose condition holds."""
        if isinstance(expr, sympy.Piecewise):
            parts = [self._index(value, env, of_stride) for value, _ in expr.args]
            conditions = [self._condition(condition, env) for _, condition in expr.args]
            chosen = index_value(parts[-1])  # the last condition is true: torch's form of an else
            for part, condition in zip(parts[-2::-1], conditions[-2::-1], strict=True):
                chosen = where(condition, index_value(part), chosen)
            low, high = min(p.bounds[0] for p in parts), max(p.bounds[1] for p in parts)
            return self.compute(chosen, low, high, ix.hint_of(ix.extent(parts[0])))
        parts = [self._index(part, env, of_stride) for part in expr.args]
        name, pick = ("minimum", min) if isinstance(expr, Min) else ("maximum", max)
        chosen = reduce(partial(op, name), map(index_value, parts))
        low, high = (pick(p.bounds[end] for p in parts) for end in (0, 1))
        hint = pick(ix.hint_of(ix.extent(p)) for p in parts)
        return self.compute(chosen, low, high, hint)

    def _condition(self, condition: sympy.Basic, env: ShapeEnv) -> Expr:
        if condition in (sympy.true, sympy.false):
            return Constant(condition is sympy.true, torch.bool)
        name = _RELATIONS.get(type(condition))
        if name is not None:
            return op(name, *(index_value(self._index(side, env, False)) for side in condition.args))
        logic = _LOGIC.get(type(condition))
        if logic is not None:
            return reduce(logic, (self._condition(part, env) for part in condition.args))
        if isinstance(condition, sympy.Not):
            return ~self._condition(condition.args[0], env)
        raise UnsupportedError(f"the condition {condition} on sizes")

    def of_symbol(self, value: torch.SymBool) -> Index:
        """The number that a boolean read from a tensor is: 0 or 1."""
        node = value.node
        (symbol,) = node.expr.free_symbols
        return ix.of(self._size(symbol, node.shape_env))

    def _size(self, symbol: sympy.Symbol, env: ShapeEnv) -> Size:
        size = self._symbols.get(symbol)
        if size is None:
            low, high = _limits(env.var_to_range[symbol])
            size = Size(str(symbol), low, high, _hint(symbol, env, low, high))
            self._symbols[symbol] = size
        return size


def _positive(divisor: Index) -> bool:
    # A divisor that may be 0 is the size of an empty dimension, over which nothing runs.
    return divisor.bounds[0] >= 0 and divisor is not ix.ZERO


def _limits(limits: Any) -> tuple[int, int]:
    low = max(int(limits.lower), _LEAST) if limits.lower.is_Integer else _LEAST
    high = min(int(limits.upper), _MOST) if limits.upper.is_Integer else _MOST
    return low, high


def _hint(symbol: sympy.Symbol, env: ShapeEnv, low: int, high: int) -> int:
    example = symbol_examples(env).get(symbol)
    return int(example) if example is not None else min(max(TYPICAL_SIZE, low), high)
