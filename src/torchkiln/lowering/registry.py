"""Which operator is lowered by which function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

LoweringFunction = Callable[..., Any]
F = TypeVar("F", bound=LoweringFunction)

# Filled while the family modules are imported, read-only afterwards.
LOWERINGS: dict[torch._ops.OpOverload, LoweringFunction] = {}


class NotLowered(Exception):
    """Raised by a lowering for a case it does not cover; the operator then runs as an extern call."""


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """Overloads for ``name``: ``"add.Tensor"`` one, ``"add"`` all of them, ``"kiln::random"`` of another namespace
    than ATen's. Unknown names give none.

    Operators come and go between the supported torch versions, so a missing one is not an error.
    """
    base, _, overload = name.partition(".")
    namespace, found, short = base.partition("::")
    if found:
        packet = getattr(getattr(torch.ops, namespace), short, None)
    else:
        packet = _builtin(base)
    if packet is None:
        return []
    names = (overload,) if overload else packet.overloads()
    return [getattr(packet, n) for n in names if n in packet.overloads()]


def _builtin(base: str) -> Any:
    return getattr(torch.ops.aten, base, None) or getattr(torch.ops.prims, base, None)


def lowers(*names: str) -> Callable[[F], F]:
    """Register a function ``f(builder, *args, **kwargs)`` for the named ATen operators."""

    def register(function: F) -> F:
        for name in names:
            for overload in overloads(name):
                schema = overload._schema
                if "out" in schema.overload_name or schema.is_mutable:
                    continue
                LOWERINGS[overload] = function
        return function

    return register
