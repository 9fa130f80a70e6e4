"""The dispatch keys that torch marks every tensor with, and where a C++ tensor holds them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

# A C++ tensor is at least this long; how its fields lie is private to torch.
_SEARCHED_BYTES = 192


@dataclass(frozen=True)
class PlainKeys:
    """How the keys of a plain tensor look: ``keys & relevant == expected``.

    ``marks`` are the keys of tensors that torch can copy to plain ones: zeros without memory, and memory to be negated
    or conjugated. ``devices`` are the keys that tell the CPU from NVIDIA cards: tensors of a card differ in them alone.
    ``offset`` is where a C++ tensor holds its keys, None where that was not found out.
    """

    relevant: int
    expected: int
    marks: int
    devices: int
    offset: int | None


@cache
def plain_keys() -> PlainKeys:
    """The keys of plain tensors in this torch. Autograd's are ignored: tensors made in inference mode lack them."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        plain = torch.zeros(1, device="cpu")
        with torch.inference_mode():
            inference = torch.zeros(1, device="cpu")
        negated, zeros = torch._neg_view(plain), torch._efficientzerotensor(1, device="cpu")
        conjugated = torch.zeros(1, device="cpu", dtype=torch.complex64).conj()
        samples = [plain, inference, negated, zeros, torch.zeros(1, device="meta"), plain.to_sparse()]
    return PlainKeys(
        relevant=~(keys_of(plain) ^ keys_of(inference)) & (2**64 - 1),
        expected=keys_of(inference) & keys_of(plain),
        marks=(keys_of(negated) | keys_of(zeros) | keys_of(conjugated)) & ~keys_of(plain),
        devices=_bits("CPU") ^ _bits("CUDA") | _bits("AutocastCPU") | _bits("AutocastCUDA"),
        offset=_offset(samples),
    )


def _bits(name: str) -> int:
    return int(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr())


def keys_of(tensor: torch.Tensor) -> int:
    """The set of keys as bits."""
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _offset(samples: Sequence[torch.Tensor]) -> int | None:
    """The one place where each of these C++ tensors, all of other keys, holds its own."""
    found = [
        offset
        for offset in range(0, _SEARCHED_BYTES, 8)
        if all(ctypes.c_uint64.from_address(tensor._cdata + offset).value == keys_of(tensor) for tensor in samples)
    ]
    return found[0] if len(found) == 1 else None
