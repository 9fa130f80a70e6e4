"""The signature of a package: what a call takes and returns, and the weights, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

import torch
from torch.utils import _pytree as pytree

from torchkiln.aot.size_conditions import SizeCondition, check_condition
from torchkiln.aot.structures import arguments_to_json, results_to_json, structure_from_json

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}

Constant = Union[bool, int, float, str, None]
CONSTANT_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Range:
    """The values that a size or a number may have; a bound that is None is none."""

    least: int | None
    most: int | None

    def __contains__(self, value: int) -> bool:
        return (self.least is None or self.least <= value) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        if self.least is None:
            return "an integer" if self.most is None else f"{self.most} or less"
        return f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"

    def scaled(self, times: int, plus: int) -> Range:
        """The range of ``times`` a value, plus ``plus``."""
        bounds = [None if bound is None else bound * times + plus for bound in (self.least, self.most)]
        return Range(*(bounds if times > 0 else reversed(bounds)))


@dataclass(frozen=True)
class SymbolicSize:
    """``times`` the symbol of that number, plus ``plus``."""

    symbol: int
    times: int = 1
    plus: int = 0


# None is a size that only native code compares: a product of symbols, for example.
Size = Union[int, SymbolicSize, None]


@dataclass(frozen=True)
class TensorInput:
    """A tensor that is given at each call. ``order`` lists its dimensions from the largest stride to the smallest.

    ``trained`` says whether a package for training computes its gradient.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Size, ...]
    order: tuple[int, ...]
    mutated: bool = False
    trained: bool = False


@dataclass(frozen=True)
class NumberInput:
    """An integer that is given at each call."""

    name: str
    value: Size


@dataclass(frozen=True)
class ConstantInput:
    """A value that the code was compiled for, and that calls may not change."""

    name: str
    value: Constant


Input = Union[TensorInput, NumberInput, ConstantInput]


@dataclass(frozen=True)
class Weight:
    """A parameter, buffer or constant tensor of the model.

    ``names`` are all it has in the model; it is stored under the first. ``trained`` as in :class:`TensorInput`.
    """

    names: tuple[str, ...]
    kind: Literal["parameter", "buffer", "constant"]
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    mutated: bool = False
    trained: bool = False


@dataclass(frozen=True)
class ComputedResult:
    """The result of that number among those that native code returns."""

    number: int


@dataclass(frozen=True)
class ConstantResult:
    """A result that is the same for all calls."""

    value: Constant


@dataclass(frozen=True)
class Signature:
    """How a package is called.

    The native function takes the weights, then the inputs that are no constants. ``inputs`` are the leaves of
    ``arguments``, the structure of positional and keyword arguments; ``positional`` names the former. ``results`` are
    the leaves of ``returned``. ``ranges`` belong to the symbols that sizes refer to by number, and ``conditions`` are
    what sizes must fulfil together. ``unread`` are names of parameters and buffers that the model has and its code does
    not read.
    """

    inputs: tuple[Input, ...]
    weights: tuple[Weight, ...]
    unread: tuple[str, ...]
    results: tuple[ComputedResult | ConstantResult, ...]
    ranges: tuple[Range, ...]
    conditions: tuple[SizeCondition, ...]
    positional: tuple[str, ...]
    arguments: pytree.TreeSpec
    returned: pytree.TreeSpec


_TYPES: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        *(Range, SizeCondition, SymbolicSize, TensorInput, NumberInput, ConstantInput, Weight),
        *(ComputedResult, ConstantResult, Signature),
    )
}
_STRUCTURES = {"arguments": arguments_to_json, "returned": results_to_json}


def signature_to_json(signature: Signature) -> Any:
    """Nested dictionaries and lists for the ``json`` module; PackageError for structures that have no such form."""
    return _to_json(signature)


def signature_from_json(tree: Any) -> Signature:
    """Raises ValueError, TypeError or LookupError for what :func:`signature_to_json` does not write."""
    signature = _checked(_from_json(tree), Signature)
    _check_inputs(signature)
    _check_results(signature)
    return signature


def _to_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float):
        return {"float": value.hex()}  # JSON has no infinities and no NaN
    if not dataclasses.is_dataclass(value):
        return value
    fields = {
        field.name: _STRUCTURES[field.name](content)
        if isinstance(content := getattr(value, field.name), pytree.TreeSpec)
        else _to_json(content)
        for field in dataclasses.fields(value)
    }
    return {"type": type(value).__name__, **fields}


def _from_json(tree: Any) -> Any:
    if isinstance(tree, list):
        return tuple(_from_json(item) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "dtype" in tree and "type" not in tree:
        return _DTYPES[tree["dtype"]]
    if "float" in tree:
        return float.fromhex(tree["float"])
    kind = _TYPES[tree["type"]]
    return kind(
        **{
            name: structure_from_json(content) if name in _STRUCTURES else _from_json(content)
            for name, content in tree.items()
            if name != "type"
        }
    )


_Kind = TypeVar("_Kind")


def _checked(value: Any, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _check_inputs(signature: Signature) -> None:
    """What a call relies on; the values themselves, and native code's own inputs, are compared by native code."""
    if len(signature.inputs) != signature.arguments.num_leaves:
        raise ValueError("the signature has another number of inputs than its arguments have leaves")
    for found in signature.ranges:
        if type(found) is not Range or not all(type(bound) in (int, type(None)) for bound in (found.least, found.most)):
            raise TypeError("the range of a size is none")
    told: set[int] = set()
    for given in signature.inputs:
        if isinstance(given, TensorInput):
            if sorted(given.order) != list(range(len(given.sizes))):
                raise ValueError(f"the strides of {given.name} are in no order")
            for size in given.sizes:
                told |= _checked_symbol(size, len(signature.ranges))
        elif isinstance(given, NumberInput):
            told |= _checked_symbol(given.value, len(signature.ranges))
        else:
            _checked(given, ConstantInput)
    for condition in signature.conditions:
        check_condition(condition, told)


def _checked_symbol(size: Size, symbols: int) -> set[int]:
    """The symbol that ``size`` tells, if it does."""
    if size is None or type(size) is int:
        return set()
    found = _checked(size, SymbolicSize)
    if not all(type(number) is int for number in (found.symbol, found.times, found.plus)):
        raise TypeError("a size is no number")
    if not 0 <= found.symbol < symbols or found.times == 0:
        raise ValueError("a size belongs to no range")
    return {found.symbol}


def _check_results(signature: Signature) -> None:
    if len(signature.results) != signature.returned.num_leaves:
        raise ValueError("the signature has another number of results than leaves to return them in")
    numbers = [result.number for result in signature.results if isinstance(result, ComputedResult)]
    if numbers != list(range(len(numbers))):
        raise ValueError("the results are not those of native code, in order")
