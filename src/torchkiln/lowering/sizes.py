"""Sizes in torch's terms and in the IR's: integers, or expressions of symbols whose values come with the inputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Mod, PythonMod

from torchkiln.errors import UnsupportedError
from torchkiln.ir import index as ix
from torchkiln.ir.index import Extent, Index, Size

# Whole numbers are 64 bits wide at run time.
_LEAST, _MOST = -(2**63), 2**63 - 1
# A typical value of a size that depends on data, of which torch has no example.
_UNKNOWN_HINT = 1024


class Sizes:
    """Converts the sizes of one graph, and remembers where each symbol's value is found."""

    def __init__(self) -> None:
        self._symbols: dict[sympy.Symbol, Size] = {}
        self._known: dict[tuple[sympy.Expr, bool], Index] = {}
        self._found: set[Size] = set()

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
        if node.is_constant():
            return int(node.maybe_as_int())
        return ix.extent(self._index(node.expr, node.shape_env, of_stride))

    def decide(self, extent: Extent) -> Size | None:
        """The symbol that ``extent`` is, where its value was not known before this; from here on it is."""
        if isinstance(extent, int) or extent.const or list(extent.terms.values()) != [1]:
            return None
        (monomial,) = extent.terms
        if len(monomial) != 1 or not isinstance(monomial[0], Size):
            return None
        found = monomial[0]
        if found in self._found:
            return None
        self._found.add(found)
        return found

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
        parts = [self._index(part, env, of_stride) for part in expr.args] if _has_whole_parts(expr) else []
        if expr.is_Add:
            return sum(parts, ix.ZERO)
        if expr.is_Mul:
            return _multiplied(parts)
        if expr.is_Pow and expr.exp.is_Integer and 0 < int(expr.exp) <= 8:
            return _multiplied([self._index(expr.base, env, of_stride)] * int(expr.exp))
        if isinstance(expr, (FloorDiv, CleanDiv)) and _positive(parts[1]):
            return parts[0] // ix.extent(parts[1])
        if isinstance(expr, (Mod, PythonMod)) and _positive(parts[1]):
            return parts[0] % ix.extent(parts[1])
        if of_stride and isinstance(expr, Max) and len(parts) == 2 and ix.constant(1) in parts:
            return parts[1] if parts[0] is ix.constant(1) else parts[0]
        raise UnsupportedError(f"the size {expr}")

    def _size(self, symbol: sympy.Symbol, env: ShapeEnv) -> Size:
        size = self._symbols.get(symbol)
        if size is None:
            limits = env.var_to_range[symbol]
            low = max(int(limits.lower), _LEAST) if limits.lower.is_Integer else _LEAST
            high = min(int(limits.upper), _MOST) if limits.upper.is_Integer else _MOST
            size = Size(str(symbol), low, high, _hint(symbol, env, low, high))
            self._symbols[symbol] = size
        return size


def _has_whole_parts(expr: sympy.Expr) -> bool:
    return expr.is_Add or expr.is_Mul or isinstance(expr, (FloorDiv, CleanDiv, Mod, PythonMod, Max))


def _multiplied(factors: Sequence[Index]) -> Index:
    result = ix.constant(1)
    for factor in factors:
        result = result * factor
    return result


def _positive(divisor: Index) -> bool:
    # A divisor that may be 0 is the size of an empty dimension, over which nothing runs.
    return divisor.bounds[0] >= 0 and divisor is not ix.ZERO


def _hint(symbol: sympy.Symbol, env: ShapeEnv, low: int, high: int) -> int:
    values: Any = getattr(env, "backed_var_to_val", None)
    if values is None:
        values = env.var_to_val
    value = values.get(symbol)
    return int(value) if value is not None else min(max(_UNKNOWN_HINT, low), high)


def known(size: Extent, what: str) -> int:
    """``size`` as a number, where ``what`` must be known while compiling."""
    if isinstance(size, int):
        return size
    raise UnsupportedError(f"{what} is {size}, which is known only at run time")
