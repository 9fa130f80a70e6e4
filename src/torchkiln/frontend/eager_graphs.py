"""Functional graphs that run eagerly, with results that autograd can take as it takes those of native code.

What native code decides from the graph (``lowering/outputs.py``) is decided here from the tensors of each call: any two
of one storage count as sharing memory, also where their elements lie apart, and what eager handed on is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchkiln.graph.effects import storage_of

Function = Callable[..., Any]


def with_native_results(function: Function, kind: str) -> Function:
    """``function``, a forward or backward run eagerly, with results that autograd can take as its own.

    A graph of another ``kind`` is returned as it is.
    """
    adjust = {"forward": _with_one_version_per_storage, "backward": _with_one_gradient_per_storage}.get(kind)
    if adjust is None:
        return function
    return lambda *arguments: adjust(arguments, function(*arguments))


def _storage(value: Any) -> int | None:
    """What tells the memory of a tensor from others; None for one without elements, and for anything else."""
    return storage_of(value) if isinstance(value, torch.Tensor) and value.numel() else None


def _with_one_version_per_storage(arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Views as plain tensors, with the version of the memory they show: ``_unsafe_view`` gives them another."""
    first: dict[int, torch.Tensor] = {}
    made = []
    for value in results:
        storage = _storage(value)
        if storage is not None:
            base = first.setdefault(storage, value)
            if base is not value and base.dtype == value.dtype:
                value = base.as_strided(value.shape, value.stride(), value.storage_offset())
            value = value.detach() if value._is_view() else value
        made.append(value)
    return made


def _with_one_gradient_per_storage(arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """A copy of each gradient that shows memory of an argument, or of another gradient, and is not that tensor."""
    held = {_storage(value): value for value in arguments}
    made = []
    for value in results:
        storage = _storage(value)
        if storage is not None and held.setdefault(storage, value) is not value:
            value = value.clone()
        made.append(value)
    return made
