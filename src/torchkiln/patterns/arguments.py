"""One form for the arguments of a call, however it is written: by position, by name, or left to its default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

from torchkiln.graph.nodes import argument_names
from torchkiln.graph.operators import COMMUTATIVE, named_operators


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()
"""Stands for an argument without a default that was not given."""


@dataclass(frozen=True)
class ArgumentForm:
    """The arguments of one target in the order of its schema."""

    names: tuple[str, ...] = ()
    defaults: tuple[Any, ...] = ()
    positional: int = 0
    commutes: bool = False
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

    def arrange(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        return (*args, *(kwargs[name] for name in sorted(kwargs)), *sorted(kwargs))


_FREE_FORM = _FreeForm()

_COMMUTING = COMMUTATIVE.union(named_operators("fmax fmin hypot"))


@lru_cache(maxsize=4096)
def argument_form(target: Any) -> ArgumentForm:
    """How ``target`` takes its arguments."""
    if not isinstance(target, torch._ops.OpOverload):
        return _form_of_function(target)
    arguments = target._schema.arguments
    return ArgumentForm(
        argument_names(target),
        tuple(argument.default_value if argument.has_default_value() else ABSENT for argument in arguments),
        sum(not argument.kwarg_only for argument in arguments),
        commutes=target in _COMMUTING,
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
    )
