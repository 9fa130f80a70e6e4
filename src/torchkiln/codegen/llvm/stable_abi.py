"""Operator arguments as torch's stable ABI carries them: every value in 64 bits, some of them owned objects.

What the ABI carries, in torch 2.11 to 2.13: tensors, int, float, bool, dtype, layout, memory format, device,
and optionals and lists of these. What it does not: Scalar (``number``), complex, generators, streams. It carries
strings too, but every call leaks a copy (torch 2.13), which also keeps large blocks around it from becoming one again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Union

import torch

from torchkiln.ir.index import Extent, Index
from torchkiln.ir.program import StridedView
from torchkiln.native.symbols import dtype_code, has_dtype_code, shim_constant


@dataclass(frozen=True)
class Present:
    """An optional that has a value: a box the call frees. An absent one is :data:`ABSENT`."""

    item: StableValue


StableValue = Union[Extent, StridedView, tuple["StableValue", ...], Present]
"""A value that is its 64 bits as a signed integer, which may be known only at run time, or an owned object that the
call takes: a tensor handle, a list or a box.
"""
ABSENT = 0


class NotCarried(Exception):
    """The stable ABI has no form for a value, or none that frees it."""


def encode(kind: Any, value: object, length: int | None = None) -> StableValue:
    """``value`` as the schema type ``kind`` wants it; ``length`` is N of a type like ``int[2]``."""
    name = kind.kind()
    if name == "OptionalType":
        return ABSENT if value is None else Present(encode(kind.getElementType(), value, length))
    if name == "ListType":
        if not isinstance(value, (tuple, list)):
            value = (value,) * (length or 1)
        return tuple(encode(kind.getElementType(), item) for item in value)
    if name == "TensorType" and isinstance(value, StridedView):
        return value
    if name in ("IntType", "SymIntType") and isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if name in ("IntType", "SymIntType") and isinstance(value, Index):
        return value
    if name == "BoolType" and isinstance(value, (bool, int)):
        return int(bool(value))
    if name == "FloatType" and isinstance(value, (int, float)):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return _enumerated(name, value)


def _enumerated(name: str, value: object) -> int:
    if name == "ScalarTypeType" and isinstance(value, torch.dtype) and has_dtype_code(value):
        return dtype_code(value)
    if name == "LayoutType" and value is torch.strided:
        return shim_constant("aoti_torch_layout_strided")
    if name == "MemoryFormatType" and isinstance(value, torch.memory_format):
        return shim_constant(f"aoti_torch_memory_format_{str(value).removeprefix('torch.')}")
    if name == "DeviceObjType" and isinstance(value, torch.device) and value.type in ("cpu", "cuda"):
        index = -1 if value.index is None else value.index
        return shim_constant(f"aoti_torch_device_type_{value.type}") << 32 | (index & 0xFFFFFFFF)
    raise NotCarried(f"{name} {value!r}")
