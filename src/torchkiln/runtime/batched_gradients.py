"""Several gradients at once: ``torch.autograd.grad(..., is_grads_batched=True)``, which vectorized jacobians ask for.

torch runs the backward of everything once, on tensors with a hidden dimension that have no memory of their own. Native
code reads memory, so a compiled backward runs once for each slice, and its results get the hidden dimension back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor

from torchkiln.errors import NotPlainError
from torchkiln.runtime.tracing import not_traced

is_batched: Callable[[torch.Tensor], bool] = is_legacy_batchedtensor


def any_batched(values: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and is_batched(value) for value in values)


def with_batched_gradients(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """``compiled``, a backward, as a function of one list of arguments, of which some may be batched."""
    takes_list = getattr(compiled, "_boxed_call", False)

    @not_traced
    def call(arguments: list[Any]) -> Any:
        try:
            return compiled(arguments) if takes_list else compiled(*arguments)
        except NotPlainError:  # raised before anything has run, with the arguments still there
            if not any_batched(arguments):
                raise
            return over_slices(call, arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def over_slices(function: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> tuple[Any, ...]:
    """``function`` of a list of values, of which some tensors are batched; its results are batched too.

    It is given the same objects for all slices but for the batched ones, and may empty the list.
    """
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return _over_slices(function, values, level)


def _over_slices(function: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any], level: int) -> tuple[Any, ...]:
    batched = [k for k, value in enumerate(values) if isinstance(value, torch.Tensor) and is_batched(value)]
    if not batched:
        return tuple(function(list(values)))
    # The hidden dimension in front; one of size 1 where a tensor is batched only for an enclosing call.
    parts = {k: torch._remove_batch_dim(values[k], level, 1, 0) for k in batched}
    size = max(part.shape[0] for part in parts.values())

    def run(index: int) -> tuple[Any, ...]:
        slices = list(values)
        for k, part in parts.items():
            slices[k] = part[index if part.shape[0] == size else 0]
        return _over_slices(function, slices, level - 1)

    rows = [run(index) for index in range(size)]
    return tuple(_joined(column, level) for column in zip(*rows, strict=True))


def _joined(results: Sequence[Any], level: int) -> Any:
    if not isinstance(results[0], torch.Tensor):
        return results[0]
    return torch._add_batch_dim(torch.stack(list(results)), 0, level)
