"""One form for the arguments of a call, however it is written: by position, by name, or left to its default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands for an argument without a default that was not given."""


class ArgumentForm:
    """The arguments of one target in the order of its schema."""

    __slots__ = ("commutes", "defaults", "names", "positional")

    def __init__(self, names: tuple[str, ...], defaults: tuple[Any, ...], positional: int, *, commutes: bool) -> None:
        self.names = names
        self.defaults = defaults
        self.positional = positional
        self.commutes = commutes
        """Whether the first two arguments may be exchanged."""

    def arrange(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """All arguments in order; None when the target does not take these."""
        if len(args) > self.positional:
            return None
        values = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            try:
                values[self.names.index(name)] = value
            except ValueError:
                return None
        return tuple(values)


class _FreeForm(ArgumentForm):
    """A target without a schema: arguments as they are written."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__((), (), 0, commutes=False)

    def arrange(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return (*args, *(kwargs[name] for name in sorted(kwargs)), *sorted(kwargs))


_FREE_FORM = _FreeForm()

_COMMUTING = frozenset(
    f"aten::{name}"
    for name in (
        "add", "mul", "maximum", "minimum", "eq", "ne", "bitwise_and", "bitwise_or", "bitwise_xor",
        "logical_and", "logical_or", "logical_xor", "fmax", "fmin", "hypot",
    )
)  # fmt: skip


@lru_cache(maxsize=4096)
def argument_form(target: Any) -> ArgumentForm:
    """How ``target`` takes its arguments."""
    if not isinstance(target, torch._ops.OpOverload):
        return _form_of_function(target)
    schema = target._schema
    arguments = schema.arguments
    return ArgumentForm(
        tuple(argument.name for argument in arguments),
        tuple(argument.default_value if argument.has_default_value() else ABSENT for argument in arguments),
        sum(not argument.kwarg_only for argument in arguments),
        commutes=schema.name in _COMMUTING and _is_of_tensors(arguments),
    )


def _form_of_function(target: Any) -> ArgumentForm:
    """The form of a Python function; functions written in C, methods and those with ``*args`` have none."""
    if not isinstance(target, FunctionType):
        return _FREE_FORM
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        return _FREE_FORM
    return ArgumentForm(
        tuple(parameter.name for parameter in parameters),
        tuple(ABSENT if p.default is inspect.Parameter.empty else p.default for p in parameters),
        sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters),
        commutes=False,
    )


def _is_of_tensors(arguments: Sequence[Any]) -> bool:
    # add has a third argument, alpha, which scales the second: exchanging is right where it has its default, 1.
    kinds = [str(argument.type) for argument in arguments[:2]]
    return kinds == ["Tensor", "Tensor"]
