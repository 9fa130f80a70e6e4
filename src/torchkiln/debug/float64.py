"""The float64 reference: a program run with every float of lower precision in float64.

Random numbers are drawn in their own precision, so that they are eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def widened(values: Any) -> Any:
    """``values`` with tensors of float64 in place of those of lower precision; leaves ask for gradients as before."""

    def widen(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _WIDER:
            return value
        return value.detach().to(_WIDER[value.dtype]).requires_grad_(value.requires_grad)

    return tree_map(widen, values)


class InFloat64(TorchDispatchMode):
    """Operators called inside compute in float64, whatever dtype they are asked for."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            given = tree_map(_narrow, args)
            drawn = func(*given, **tree_map(_narrow, dict(kwargs or {})))
            if drawn is given[0] and drawn is not args[0]:  # drawn in place
                return args[0].copy_(drawn)
            return tree_map(wide, drawn)
        return func(*tree_map(wide, args), **tree_map(wide, dict(kwargs or {})))


def wide(value: Any) -> Any:
    """An argument of an operator as it is in float64; dtypes are arguments too."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return value.to(_WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in _WIDER else value


def _narrow(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, Tensor) and value.dtype is torch.float64 else value
