"""Which function lowers which operator of the table (``graph/operators.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchkiln.graph.operators import lowered, overloads

LoweringFunction = Callable[..., Any]
F = TypeVar("F", bound=LoweringFunction)

# Filled while the family modules are imported, read-only afterwards.
LOWERINGS: dict[torch._ops.OpOverload, LoweringFunction] = {}


class NotLowered(Exception):
    """Raised by a lowering for a case it does not cover; the operator then runs as an extern call."""


def lowers(*names: str) -> Callable[[F], F]:
    """Register a function ``f(builder, *args, **kwargs)`` for the named operators, ``"add.Tensor"`` or all declared
    overloads of ``"add"``. Those that the installed torch does not have are left out."""

    def register(function: F) -> F:
        for name in names:
            found = overloads(name)
            declared = [overload for overload in found if overload in lowered()]
            if found and not declared:
                raise ValueError(f"{name} has a lowering; declare it in graph/operators.py, as a loop or a native call")
            LOWERINGS.update(dict.fromkeys(declared, function))
        return function

    return register
