"""Whether anybody beside the caller's list of inputs can see the memory of a tensor.

Backward is given what forward saved. Autograd may keep it (``retain_graph=True``), a saved-tensor hook may have kept
it, or a tensor that shares its memory. Reference counts show all of that: they are compared with those of a new tensor
in a list. They show nothing of memory that is not torch's (NumPy arrays, mapped files), which torch never resizes, nor
of other processes.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def is_held_alone(inputs: list[Any], position: int) -> bool:
    """Whether ``inputs[position]`` is a plain tensor that only this list holds, as nobody else does its memory."""
    given = inputs[position]
    if not _CAN_COUNT or type(given) is not torch.Tensor or given.layout is not torch.strided:
        return False
    del given  # it would be counted
    return _counts(inputs, position) == _counts_when_alone()


def _counts(inputs: list[Any], position: int) -> tuple[int, int, int, int, bool, bool]:
    """References to the Python and the C++ tensor, the Python and the C++ storage, and what kind of memory that has."""
    tensor: Any = inputs[position]
    storage = tensor.untyped_storage()
    return (
        sys.getrefcount(tensor),
        tensor._use_count(),
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
        storage.resizable(),
        storage.is_shared(),
    )


@cache
def _counts_when_alone() -> tuple[int, int, int, int, bool, bool]:
    with _disable_current_modes():
        return _counts([torch.empty(1)], 0)
