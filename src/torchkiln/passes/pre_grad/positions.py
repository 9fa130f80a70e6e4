"""Tensors made of positions: what each element is, as a function of its place.

Programs make masks of attention from ``arange``, comparisons, ``tril`` and ``where``. Such tensors are followed by what
they say, not computed: a mask of any size costs the same, and one of symbolic sizes is known as well.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType, MappingProxyType
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from torchkiln.passes.pre_grad.rewriting import CapturedGraph

Size = int | torch.SymInt
Number = bool | int | float

# Numbers above these may be out of int64's range at some index, where eager's wrap.
_LARGEST_CONSTANT = 1 << 40
_LARGEST_COEFFICIENT = 1 << 20

# An operand that nothing is known of. It is no None, which has a meaning in an index.
_UNKNOWN = object()


@dataclass(frozen=True)
class Linear:
    """``constant`` plus each index times its coefficient; one coefficient for each dimension."""

    coefficients: tuple[int, ...]
    constant: Size

    def times(self, factor: int) -> Linear:
        return Linear(tuple(factor * value for value in self.coefficients), factor * self.constant)

    def plus(self, other: Linear | Size) -> Linear:
        """The sum, dimensions counted from the last one where the ranks differ."""
        if not isinstance(other, Linear):
            return replace(self, constant=self.constant + other)
        rank = max(len(self.coefficients), len(other.coefficients))
        pairs = zip(_padded(self, rank), _padded(other, rank), strict=True)
        return Linear(tuple(a + b for a, b in pairs), self.constant + other.constant)

    def least(self, shape: Sequence[Size]) -> Size:
        """The smallest value in a tensor of that shape, should it have elements."""
        lowest = self.constant
        for coefficient, size in zip(self.coefficients, shape, strict=True):
            if coefficient < 0:
                lowest = lowest + coefficient * (size - 1)
        return lowest


@dataclass(frozen=True)
class Choice:
    """``inside`` where every number of ``conditions`` is zero or more, ``outside`` in all other places."""

    conditions: tuple[Linear, ...]
    inside: Number
    outside: Number

    def map(self, function: Callable[[Number], Number]) -> Choice:
        return replace(self, inside=function(self.inside), outside=function(self.outside))

    def with_negated_condition(self) -> Choice:
        """The same tensor: where there is one condition, it is negated and what was outside is inside."""
        if len(self.conditions) != 1:
            return self
        (condition,) = self.conditions
        return Choice((condition.times(-1).plus(-1),), self.outside, self.inside)


Contents = Linear | Choice


class Positions:
    """The contents of a graph's tensors, found when asked for."""

    def __init__(self, graph: CapturedGraph) -> None:
        self._graph = graph
        self._found: dict[torch.fx.Node, Contents | None] = {}

    def contents(self, node: torch.fx.Node) -> Contents | None:
        """What ``node`` holds, one coefficient for each of its dimensions; None where that is not known."""
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [source for source in current.all_input_nodes if source not in self._found]
            if missing and current.target in _READ:
                pending += missing
                continue
            pending.pop()
            if current not in self._found:
                self._found[current] = self._read(current)
        return self._found[node]

    def _read(self, node: torch.fx.Node) -> Contents | None:
        tensor = self._graph.tensor(node)
        read = _READ.get(node.target) if node.op in ("call_function", "call_method") else None
        if tensor is None or read is None or node.kwargs.get("out") is not None:
            return None
        if self._graph.memory.is_written_after(node):
            return None
        args, kwargs = torch.fx.map_arg((tuple(node.args), dict(node.kwargs)), self._operand)
        try:
            return _within(read(tensor, *args, **kwargs), tensor)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # an unread form, or a number that does not fit
            return None

    def _operand(self, node: torch.fx.Node) -> Any:
        """A size by its value, a tensor by its contents."""
        value = self._graph.value(node)
        if isinstance(value, (int, float, torch.SymInt, torch.Size)):
            return value
        return self._found.get(node) or _UNKNOWN


def _within(contents: Contents | None, tensor: torch.Tensor) -> Contents | None:
    """``contents`` as those of ``tensor``: its rank and dtype, without conditions that always or never hold."""
    shape = tuple(tensor.shape)
    if isinstance(contents, Linear):
        return _over(contents, shape) if tensor.dtype is torch.int64 and _is_small(contents) else None
    if contents is None or tensor.is_complex():
        return None
    contents = contents.map(lambda value: _element(value, tensor.dtype))
    conditions = [_over(condition, shape) for condition in contents.conditions]
    if any(statically_known_true(condition.times(-1).least(shape) > 0) for condition in conditions):
        return _constant(contents.outside)
    open_ones = tuple(each for each in conditions if not statically_known_true(each.least(shape) >= 0))
    if not open_ones or contents.inside == contents.outside:
        return _constant(contents.inside)
    return replace(contents, conditions=open_ones)


def _is_small(value: Linear) -> bool:
    """Whether eager computes the same numbers, whose range is that of int64."""
    constant = value.constant
    return all(abs(each) <= _LARGEST_COEFFICIENT for each in value.coefficients) and (
        not isinstance(constant, int) or abs(constant) <= _LARGEST_CONSTANT
    )


def _element(value: Number, dtype: torch.dtype) -> Number:
    """``value`` as an element of a tensor."""
    exact = torch.float64 if isinstance(value, float) else None
    with _disable_current_modes():
        return torch.tensor(value, dtype=exact, device="cpu").to(dtype).item()


def _over(value: Linear, shape: Sequence[Size]) -> Linear:
    """``value`` in a tensor of that shape. The index of a dimension of size one is zero."""
    coefficients = _padded(value, len(shape))
    ones = [statically_known_true(size == 1) for size in shape]
    return replace(value, coefficients=tuple(0 if one else c for c, one in zip(coefficients, ones, strict=True)))


def _padded(value: Linear, rank: int) -> tuple[int, ...]:
    return (0,) * (rank - len(value.coefficients)) + value.coefficients


def _constant(value: Number) -> Choice:
    return Choice((), value, value)


def _is_size(value: object) -> bool:
    return isinstance(value, torch.SymInt) or type(value) is int


def _arange(_: torch.Tensor, start: Any, end: Any = None, step: Any = 1, **__: Any) -> Contents | None:
    first = 0 if end is None else start
    return Linear((step,), first) if type(step) is int and _is_size(first) else None


def _filled(position: int, value: Number | None = None) -> Callable[..., Contents | None]:
    """A new tensor of one number: ``value``, or the argument at that position."""

    def read(_: torch.Tensor, *args: Any, fill_value: Any = None, **__: Any) -> Contents | None:
        number = value
        if number is None:
            number = fill_value if len(args) <= position else args[position]
        return _constant(number) if isinstance(number, (bool, int, float)) and not math.isnan(number) else None

    return read


def _same(_: torch.Tensor, source: Any, *__: Any, **___: Any) -> Contents | None:
    return source if isinstance(source, (Linear, Choice)) else None


def _with_dimensions(contents: Any, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Contents | None:
    if isinstance(contents, Linear):
        return replace(contents, coefficients=change(contents.coefficients))
    if isinstance(contents, Choice):
        changed = tuple(replace(each, coefficients=change(each.coefficients)) for each in contents.conditions)
        return replace(contents, conditions=changed)
    return None


def _unsqueeze(result: torch.Tensor, source: Any, dim: Any) -> Contents | None:
    place = dim % result.dim()
    return _with_dimensions(source, lambda values: (*values[:place], 0, *values[place:]))


def _getitem(result: torch.Tensor, source: Any, items: Any) -> Contents | None:
    """New dimensions and whole ones only: no element moves."""
    items = items if isinstance(items, tuple) else (items,)
    if not all(item is None or isinstance(item, EllipsisType) or item == slice(None) for item in items):
        return None
    if Ellipsis not in items:
        items = (*items, Ellipsis)
    place = items.index(Ellipsis)
    rest = result.dim() - (len(items) - 1)
    kept = [item is not None for item in (*items[:place], *(slice(None),) * rest, *items[place + 1 :])]

    def spread(values: tuple[int, ...]) -> tuple[int, ...]:
        remaining = iter(values)
        return tuple(next(remaining) if whole else 0 for whole in kept)

    return _with_dimensions(source, spread)


def _sum(result: torch.Tensor, left: Any, right: Any, sign: int = 1) -> Contents | None:
    if isinstance(left, Choice) or isinstance(right, Choice):
        return _on_numbers(operator.add if sign > 0 else operator.sub, left, right, result.dtype)
    if isinstance(right, Linear):
        right, left = right.times(sign), left
        return right.plus(left) if isinstance(left, Linear) or _is_size(left) else None
    return left.plus(sign * right) if isinstance(left, Linear) and _is_size(right) else None


def _difference(result: torch.Tensor, left: Any, right: Any) -> Contents | None:
    return _sum(result, left, right, sign=-1)


def _product(result: torch.Tensor, left: Any, right: Any) -> Contents | None:
    if isinstance(left, Choice) or isinstance(right, Choice):
        return _on_numbers(operator.mul, left, right, result.dtype)
    if isinstance(right, Linear):
        left, right = right, left
    if not isinstance(left, Linear) or not isinstance(left.constant, int):  # a product of sizes may be out of range
        return None
    return left.times(right) if type(right) is int else None


def _on_numbers(function: Callable[[Any, Any], Number], left: Any, right: Any, dtype: torch.dtype) -> Choice | None:
    """``function`` of a choice and a number, or a tensor that holds one number, in a result of ``dtype``.

    Some of eager's kernels for floats of 16 bits round a number before they compute with it: both ways must agree.
    """
    left, right = (_constant(value) if isinstance(value, (int, float)) else value for value in (left, right))
    if not isinstance(left, Choice) or not isinstance(right, Choice) or (left.conditions and right.conditions):
        return None
    conditions = left.conditions or right.conditions

    def computed(inner: torch.dtype) -> Choice:
        left_pair, right_pair = ([_element(v, inner) for v in (c.inside, c.outside)] for c in (left, right))
        pair = (_element(function(a, b), inner) for a, b in zip(left_pair, right_pair, strict=True))
        return Choice(conditions, *(_element(value, dtype) for value in pair))

    found = computed(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    if math.isnan(found.inside) or math.isnan(found.outside) or found != computed(dtype):
        return None
    return found


def _number(value: Any) -> Any:
    return value.inside if isinstance(value, Choice) and not value.conditions else value


def _compared(swapped: bool, strict: bool) -> Callable[..., Contents | None]:
    """``left >= right``, or with the operands swapped; a strict comparison of integers is one with one less."""

    def read(result: torch.Tensor, left: Any, right: Any) -> Contents | None:
        left, right = _number(left), _number(right)
        difference = _difference(result, right, left) if swapped else _difference(result, left, right)
        return Choice((difference.plus(-int(strict)),), True, False) if isinstance(difference, Linear) else None

    return read


def _not(result: torch.Tensor, source: Any) -> Contents | None:
    if not isinstance(source, Choice) or result.dtype is not torch.bool:
        return None
    return source.map(operator.not_).with_negated_condition()


def _and(result: torch.Tensor, left: Any, right: Any) -> Contents | None:
    if not isinstance(left, Choice) or not isinstance(right, Choice) or result.dtype is not torch.bool:
        return None
    first, second = left.map(bool), right.map(bool)
    for one, other in ((first, second), (second, first)):
        if one.inside == one.outside:
            return other if one.inside else one
    if not (first.inside and second.inside):  # where neither of two conditions holds
        return None
    rank = result.dim()
    both = (replace(each, coefficients=_padded(each, rank)) for each in (*first.conditions, *second.conditions))
    return Choice(tuple(dict.fromkeys(both)), True, False)


def _or(result: torch.Tensor, left: Any, right: Any) -> Contents | None:
    return _not(result, _and(result, _not(result, left), _not(result, right)))


def _where(_: torch.Tensor, condition: Any, inside: Any, outside: Any) -> Contents | None:
    inside, outside = _number(inside), _number(outside)
    numbers = all(isinstance(value, (bool, int, float)) for value in (inside, outside))
    if not isinstance(condition, Choice) or not numbers:
        return None
    return condition.map(lambda chosen: inside if chosen else outside)


def _masked_fill(result: torch.Tensor, source: Any, mask: Any, value: Any) -> Contents | None:
    return _where(result, mask, value, source)


def _triangle(sign: int) -> Callable[..., Contents | None]:
    """What is on the diagonal and below it (1) or above it (-1), and zero elsewhere."""

    def read(result: torch.Tensor, source: Any, diagonal: Any = 0) -> Contents | None:
        if not isinstance(source, Choice) or not _is_size(diagonal) or (source.conditions and source.outside != 0):
            return None
        kept = Linear((0,) * (result.dim() - 2) + (sign, -sign), sign * diagonal)
        return Choice((*source.conditions, kept), source.inside, 0)

    return read


def _forms(*names: str) -> tuple[Any, ...]:
    """Functions of torch and operator, and methods, of these names."""
    functions = [getattr(module, name) for module in (torch, operator) for name in names if hasattr(module, name)]
    return (*functions, *names)


# Reads a call's result from its operands, which are contents, sizes and numbers.
_READ: Mapping[Any, Callable[..., Contents | None]] = MappingProxyType(
    {
        torch.arange: _arange,
        **dict.fromkeys((torch.ones, torch.ones_like, "new_ones"), _filled(0, 1)),
        **dict.fromkeys((torch.zeros, torch.zeros_like, "new_zeros"), _filled(0, 0)),
        **dict.fromkeys((torch.full, torch.full_like), _filled(1)),
        "new_full": _filled(2),
        **dict.fromkeys(_forms("clone"), _same),
        **dict.fromkeys(("to", "type", "bool", "float", "half", "bfloat16", "int", "long", "contiguous"), _same),
        **dict.fromkeys(("expand", "expand_as", torch.broadcast_to, "broadcast_to"), _same),
        **dict.fromkeys(_forms("unsqueeze"), _unsqueeze),
        operator.getitem: _getitem,
        **dict.fromkeys(_forms("add"), _sum),
        **dict.fromkeys(_forms("sub"), _difference),
        **dict.fromkeys(_forms("mul"), _product),
        **dict.fromkeys(_forms("ge"), _compared(swapped=False, strict=False)),
        **dict.fromkeys(_forms("gt"), _compared(swapped=False, strict=True)),
        **dict.fromkeys(_forms("le"), _compared(swapped=True, strict=False)),
        **dict.fromkeys(_forms("lt"), _compared(swapped=True, strict=True)),
        **dict.fromkeys(_forms("logical_not", "bitwise_not", "invert", "__invert__"), _not),
        **dict.fromkeys(_forms("logical_and", "bitwise_and", "and_", "__and__"), _and),
        **dict.fromkeys(_forms("logical_or", "bitwise_or", "or_", "__or__"), _or),
        **dict.fromkeys((torch.where,), _where),
        **dict.fromkeys(_forms("masked_fill"), _masked_fill),
        **dict.fromkeys(_forms("tril"), _triangle(1)),
        **dict.fromkeys(_forms("triu"), _triangle(-1)),
    }
)
