"""Whether a Python tensor holds its C++ tensor where the fast entry reads it.

That layout is private to torch, so it is verified once in each process, in a way that cannot crash: the eight bytes
there must be the pointer torch reports before anything is called through them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from torchkiln.native.symbols import ANY_MODE_ON, WRAP_TENSOR, address_of
from torchkiln.native.tensor_keys import plain_keys

# Offset of the at::Tensor in a Python tensor object.
TENSOR_OFFSET = 16


@dataclass(frozen=True)
class LayoutCheck:
    """``usable`` says whether handles may be read in place; ``reason`` says why, in words for ``kiln doctor``."""

    usable: bool
    reason: str


@cache
def check_layout() -> LayoutCheck:
    """Check the layout on tensors of several kinds; the answer is the same for the life of the process."""
    for name in (WRAP_TENSOR, ANY_MODE_ON):
        if address_of(name) is None:
            return LayoutCheck(False, f"torch's libraries have no {name}")
    if plain_keys().offset is None:
        return LayoutCheck(False, "a C++ tensor does not hold its dispatch keys where they can be read")
    base = torch.arange(24, dtype=torch.float32)
    samples = {
        "a tensor": base,
        "a view": base.view(4, 6)[1:, ::2],
        "a parameter": torch.nn.Parameter(base.clone()),
        "a 0-dim tensor": torch.tensor(3, dtype=torch.int64),
        "an empty tensor": torch.empty(0, 3, dtype=torch.bfloat16),
    }
    for what, tensor in samples.items():
        problem = _problem(tensor)
        if problem:
            return LayoutCheck(False, f"{what}: {problem}")
    return LayoutCheck(True, f"verified on {len(samples)} kinds of tensor at offset {TENSOR_OFFSET}")


def _problem(tensor: torch.Tensor) -> str | None:
    if type(tensor).__basicsize__ < TENSOR_OFFSET + 8:
        return f"the Python object is only {type(tensor).__basicsize__} bytes"
    handle = id(tensor) + TENSOR_OFFSET
    if ctypes.c_uint64.from_address(handle).value != tensor._cdata:
        return f"the C++ tensor is not at offset {TENSOR_OFFSET}"
    answers = (
        ("aoti_torch_get_data_ptr", tensor.data_ptr()),
        ("aoti_torch_get_numel", tensor.numel()),
        ("aoti_torch_get_dim", tensor.dim()),
        ("aoti_torch_get_storage_offset", tensor.storage_offset()),
    )
    for name, expected in answers:
        address = address_of(name)
        if address is None:
            return f"torch's C ABI has no {name}"
        answer = ctypes.c_int64(-1)
        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(address)
        if function(handle, ctypes.addressof(answer)) != 0 or answer.value != expected:
            return f"{name} answers {answer.value} where Python says {expected}"
    return None
