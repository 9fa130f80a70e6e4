"""The arguments of a call of a package: bound to those it was compiled for, checked, flattened and laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchkiln.aot.shared_memory import Named, reject_shared_memory
from torchkiln.aot.signature import (
    ConstantInput,
    NumberInput,
    Signature,
    Size,
    SymbolicSize,
    TensorInput,
)
from torchkiln.errors import ArgumentError, shown


class ArgumentChecker:
    """Makes the flat inputs of native code of the arguments of a call; :class:`ArgumentError` where one is wrong.

    ``trains`` says whether the package computes gradients, and then refuses inputs that it has none for.
    """

    def __init__(self, signature: Signature, *, trains: bool) -> None:
        self._signature = signature
        self._trains = trains
        positional, keywords = signature.arguments.children()
        self._keywords: tuple[str, ...] = tuple(keywords.context or ())
        names = (*signature.positional, *self._keywords)
        self._expected = dict(zip(names, (*positional.children(), *keywords.children()), strict=True))
        self._count = positional.num_children
        self._writes = any(isinstance(found, TensorInput) and found.mutated for found in signature.inputs)

    def flat(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], written_weights: Sequence[Named] = ()
    ) -> list[Any]:
        """The tensors and numbers that native code takes, in order; it writes to ``written_weights``."""
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        if structure != self._signature.arguments:
            leaves, structure = pytree.tree_flatten(self._bound(args, kwargs))
            if structure != self._signature.arguments:
                raise self._wrong_structure(args, kwargs)
        sizes = _Sizes(self._signature)
        found: list[Any] = []
        for expected, given in zip(self._signature.inputs, leaves, strict=True):
            if isinstance(expected, ConstantInput):
                _check_constant(expected, given)
            elif isinstance(expected, NumberInput):
                found.append(_checked_number(expected, given, sizes))
            else:
                found.append(self._checked_tensor(expected, given, sizes))
        sizes.check_together()
        if self._writes or written_weights:
            self._reject_shared_memory(leaves, written_weights)
        return found

    def _reject_shared_memory(self, leaves: Sequence[Any], weights: Sequence[Named]) -> None:
        pairs = zip(self._signature.inputs, leaves, strict=True)
        given = [(found, (f"argument {found.name}", leaf)) for found, leaf in pairs if isinstance(found, TensorInput)]
        written = [named for found, named in given if found.mutated]
        reject_shared_memory([*weights, *written], [named for _, named in given])

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as they were given when compiling: which by position and which by name, in which order."""
        names = self._signature.positional
        given = dict(zip(names, args, strict=False))
        if len(args) > self._count:
            raise ArgumentError(f"The package takes {self._count} positional arguments, not {len(args)}.")
        for name, value in kwargs.items():
            if name in given:
                raise ArgumentError(f"The argument {name!r} is given twice, by position and by name.")
            given[name] = value
        wanted = (*names[: self._count], *self._keywords)
        for name in wanted:
            if name not in given:
                raise ArgumentError(f"The argument {name!r} is missing; the package takes: {', '.join(wanted)}.")
        unknown = [name for name in given if name not in wanted]
        if unknown:
            raise ArgumentError(
                f"The package was compiled without an argument {unknown[0]!r}; it takes: {', '.join(wanted)}."
            )
        return tuple(given[name] for name in names[: self._count]), {name: given[name] for name in self._keywords}

    def _wrong_structure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ArgumentError:
        bound, named = self._bound(args, kwargs)
        for name, value in (*zip(self._signature.positional, bound, strict=False), *named.items()):
            found = pytree.tree_structure(value)
            if found != self._expected[name]:
                return ArgumentError(
                    f"The argument {name!r} is {_described(found)}, the package was compiled for"
                    f" {_described(self._expected[name])}."
                )
        return ArgumentError("The arguments have another structure than those the package was compiled for.")

    def _checked_tensor(self, expected: TensorInput, given: Any, sizes: _Sizes) -> torch.Tensor:
        name = expected.name
        if not isinstance(given, torch.Tensor):
            raise ArgumentError(f"The argument {name} must be a tensor, not {shown(given)}.")
        if given.dtype != expected.dtype:
            raise ArgumentError(f"The argument {name} must be {expected.dtype}, not {given.dtype}.")
        if given.device.type != "cpu":
            raise ArgumentError(f"The argument {name} must be on the CPU, not on {given.device}.")
        if given.layout is not torch.strided:
            raise ArgumentError(f"The argument {name} must be {torch.strided}, not {given.layout}.")
        if given.dim() != len(expected.sizes):
            raise ArgumentError(
                f"The argument {name} must have {len(expected.sizes)} dimensions, not {given.dim()}"
                f" (sizes {list(given.shape)})."
            )
        for dim, (size, value) in enumerate(zip(expected.sizes, given.shape, strict=True)):
            sizes.check(size, value, f"Size {dim} of the argument {name}")
        if self._trains and given.requires_grad and not expected.trained and torch.is_grad_enabled():
            raise ArgumentError(
                f"The argument {name} requires a gradient, which the package does not compute: compile it with an"
                " example that does, or give it detached."
            )
        return _laid_out(expected, given)


class _Sizes:
    """The sizes of one call: in range, and those of one symbol equal."""

    def __init__(self, signature: Signature) -> None:
        self._ranges, self._conditions = signature.ranges, signature.conditions
        self._known: dict[int, tuple[int, str]] = {}
        self._values: dict[int, int] = {}

    def check(self, expected: Size, value: int, what: str) -> None:
        if expected is None:
            return
        if isinstance(expected, int):
            if value != expected:
                raise ArgumentError(f"{what} must be {expected}, not {value}.")
            return
        self._check_symbolic(expected, value, what)

    def _check_symbolic(self, expected: SymbolicSize, value: int, what: str) -> None:
        number, remainder = divmod(value - expected.plus, expected.times)
        if remainder:
            raise ArgumentError(
                f"{what} must be a multiple of {expected.times}{f' plus {expected.plus}' if expected.plus else ''},"
                f" not {value}."
            )
        allowed = self._ranges[expected.symbol]
        if number not in allowed:
            scaled = allowed.scaled(expected.times, expected.plus)
            raise ArgumentError(f"{what} must be {scaled}, not {value}.")
        self._values.setdefault(expected.symbol, value)
        known, first = self._known.setdefault(expected.symbol, (number, what[0].lower() + what[1:]))
        if known != number:
            raise ArgumentError(
                f"{what} must be {known * expected.times + expected.plus}, not {value}: it goes with {first}."
            )

    def check_together(self) -> None:
        """Called when all sizes were checked."""
        if not self._conditions:
            return
        numbers = {symbol: number for symbol, (number, _) in self._known.items()}
        for condition in self._conditions:
            if not condition.holds(numbers):
                given = ", ".join(f"{self._known[s][1]} is {self._values[s]}" for s in sorted(condition.symbols()))
                raise ArgumentError(f"The package was compiled for sizes where {condition.text}, and {given}.")


def _checked_number(expected: NumberInput, given: Any, sizes: _Sizes) -> int:
    if type(given) is not int:
        raise ArgumentError(f"The argument {expected.name} must be an integer, not {shown(given)}.")
    sizes.check(expected.value, given, f"The argument {expected.name}")
    return given


def _check_constant(expected: ConstantInput, given: Any) -> None:
    is_same = type(given) is type(expected.value) and (given == expected.value or given != given)
    if not is_same:
        raise ArgumentError(
            f"The argument {expected.name} must be {shown(expected.value)}, which the package was compiled for, not"
            f" {shown(given)}."
        )


def _laid_out(expected: TensorInput, given: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it has the strides that the code was compiled for, or a copy that has them."""
    strides, size = [0] * given.dim(), 1
    shape = given.shape
    for dim in reversed(expected.order):
        strides[dim] = size
        size *= max(shape[dim], 1)
    if all(stride == given.stride(dim) or shape[dim] <= 1 for dim, stride in enumerate(strides)):
        return given
    if expected.mutated:
        raise ArgumentError(
            f"The argument {expected.name} is written to and must have the strides {strides}, not"
            f" {list(given.stride())}."
        )
    return torch.empty_strided(shape, strides, dtype=given.dtype).copy_(given)


def _described(structure: pytree.TreeSpec) -> str:
    if structure.is_leaf():
        return "a tensor or a number"
    keys = f" with the keys {list(structure.context)}" if structure.type is dict else ""
    return f"a {structure.type.__name__} of {structure.num_leaves} leaves{keys}"

