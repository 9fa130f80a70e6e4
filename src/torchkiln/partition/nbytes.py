"""How many bytes a value of a graph takes, with typical values where sizes are symbolic."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch

from torchkiln.graph.fake import TYPICAL_SIZE, symbol_examples


class Bytes:
    """Sizes of fake values. Symbols are replaced by their examples; no guard is added to the user's program."""

    def __init__(self) -> None:
        self._known: dict[sympy.Expr, int] = {}

    def of(self, value: object) -> int:
        """The memory behind ``value``; that of all its parts where it is a tuple, and 8 bytes for a number."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, (tuple, list)):
            return sum(map(self.of, value))
        return 0 if value is None else 8

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(map(self.number, value.shape))

    def number(self, size: Any) -> int:
        """``size``, or its typical value where it is symbolic."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        if expr not in self._known:
            self._known[expr] = _typical(expr, size.node.shape_env)
        return self._known[expr]

    def _of_tensor(self, value: torch.Tensor) -> int:
        shape = self.shape(value)
        if value.layout is not torch.strided or 0 in shape:
            return math.prod(shape) * value.itemsize
        last = sum((size - 1) * self.number(stride) for size, stride in zip(shape, value.stride(), strict=True))
        return (last + 1) * value.itemsize


def _typical(expr: sympy.Expr, env: Any) -> int:
    examples = symbol_examples(env)
    known = {symbol: examples.get(symbol, sympy.Integer(TYPICAL_SIZE)) for symbol in expr.free_symbols}
    result = expr.xreplace(known)
    return max(0, int(result)) if result.is_number else TYPICAL_SIZE
