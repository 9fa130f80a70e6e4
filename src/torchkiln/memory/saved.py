"""What autograd keeps of a call for its backward, as it is when the call is over."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOT_THE_USERS = tuple(f"{os.path.dirname(os.path.abspath(file))}{os.sep}" for file in (torch.__file__, __file__))


@dataclass(frozen=True)
class SavedMemory:
    """``by_line`` has the bytes by the user's line, in the words of ``source_line``; None where none is known."""

    bytes: int
    by_line: dict[str | None, int]
    gradients: bool
    """Whether a result of the call has a backward."""


class _Kept:
    """Stands in for a saved tensor; it lives as long as autograd keeps that."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class MakerLines(TorchDispatchMode):
    """Notes for every memory that an operator inside the block makes which line of the user's called it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_address: dict[int, str | None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(results):
            if isinstance(value, Tensor) and (address := _address(value)) is not None and address not in given:
                # An address that was freed and is used again gets the line of its new owner.
                self.by_address[address] = _users_line(sys._getframe(1))
        return results


def saved_by(call: Callable[[], Any], others: Iterable[Tensor], makers: MakerLines | None = None) -> SavedMemory:
    """What ``call()`` keeps for backward: every memory once, without that of ``others`` and of its results.

    With ``makers``, which then is on during the call, it is split by the lines that made it.
    """
    found: list[weakref.ref[_Kept]] = []

    def pack(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        found.append(weakref.ref(kept))
        return kept

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
    with hooks, makers or contextlib.nullcontext():
        results = call()
    lines = makers.by_address if makers is not None else {}
    leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    seen = {address for tensor in (*others, *leaves) if (address := _address(tensor)) is not None}
    by_line: dict[str | None, int] = {}
    for reference in found:
        kept = reference()
        if kept is None:
            continue
        address = _address(kept.tensor)
        if address is None or address not in seen:
            line = lines.get(address) if address is not None else None
            by_line[line] = by_line.get(line, 0) + _nbytes(kept.tensor)
        if address is not None:
            seen.add(address)
    return SavedMemory(sum(by_line.values()), by_line, any(leaf.grad_fn is not None for leaf in leaves))


def _address(tensor: Tensor) -> int | None:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without a storage, such as a sparse one
        return tensor.untyped_storage().data_ptr()
    return None


def _nbytes(tensor: Tensor) -> int:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        return tensor.untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size()


def _users_line(frame: FrameType | None) -> str | None:
    """The innermost line outside of torch and of this package."""
    while frame is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
        frame = frame.f_back
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, line).strip()
    return f"{file}:{line} in {frame.f_code.co_name}" + (f": {code}" if code else "")
