"""Where a C++ tensor holds its storage, its offset and its version counter, for native code that compares them.

The layout is private to torch, so it is found out once in each process: a field is where tensors that share it, and no
others, have the same eight bytes. Nothing is read through a pointer that was not found so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Bytes that every such object has at least.
_TENSOR_BYTES, _STORAGE_BYTES, _COUNTER_BYTES = 192, 48, 24
# Tensors that have one version counter, and tensors that have their own, in each of two groups. Unset bytes look like a
# field among two and three tensors in one process of ten, in one group of these in one of 2,000.
_ENOUGH = 6


@dataclass(frozen=True)
class TensorFields:
    """Offsets in bytes: of the storage, the storage offset and the version counter in a C++ tensor, of the address of
    the memory in a storage, of the version, 32 bits, in a counter."""

    storage: int
    offset: int
    counter: int
    memory: int
    version: int


@cache
def tensor_fields() -> TensorFields | None:
    """The offsets in this torch; None where one of them was not found out."""
    with _disable_current_modes(), torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        tensor, other = torch.zeros(8, device="cpu"), torch.zeros(8, device="cpu")
        own_counter = tensor.data
        storage = _place(
            _TENSOR_BYTES,
            lambda at: all(_word(t._cdata + at) == t.untyped_storage()._cdata for t in (tensor, other, own_counter)),
        )
        groups = [_Counters(tensor), _Counters(other)]
        counter = _place(_TENSOR_BYTES, lambda at: at != storage and all(group.may_be_at(at) for group in groups))
        views = (tensor, tensor[3:], tensor[5:7], other[2:])
        offset = _place(_TENSOR_BYTES, lambda at: all(_word(t._cdata + at) == t.storage_offset() for t in views))
        if storage is None or counter is None or offset is None:
            return None
        # A storage also holds what its memory is freed by, which for memory of torch's own is the same address.
        borrowed = torch.frombuffer(bytearray(8), dtype=torch.uint8)
        memory = _place(
            _STORAGE_BYTES,
            lambda at: all(_word(_word(t._cdata + storage) + at) == t.data_ptr() for t in (tensor, other, borrowed)),
        )
        versions = set(range(0, _COUNTER_BYTES, 4))
        for _ in range(3):
            tensor.add_(1)
            versions &= {at for at in versions if _half(_word(tensor._cdata + counter) + at) == tensor._version}
        if memory is None or len(versions) != 1:
            return None
        return TensorFields(storage, offset, counter, memory, versions.pop())


class _Counters:
    """Tensors, all alive, with the counter of ``tensor`` and with others."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._same = [tensor, *(tensor.detach() for _ in range(_ENOUGH))]
        self._own = [tensor, tensor.data, *(torch.zeros(8, device="cpu") for _ in range(_ENOUGH))]

    def may_be_at(self, offset: int) -> bool:
        same, own = ({_word(t._cdata + offset) for t in tensors} for tensors in (self._same, self._own))
        return len(same) == 1 and same != {0} and len(own) == len(self._own)


def _place(length: int, holds: Callable[[int], bool]) -> int | None:
    """The one offset, in steps of eight bytes, for which ``holds`` is true."""
    return _only(at for at in range(0, length, 8) if holds(at))


def _only(found: Iterable[int]) -> int | None:
    places = list(found)
    return places[0] if len(places) == 1 else None


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _half(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value
