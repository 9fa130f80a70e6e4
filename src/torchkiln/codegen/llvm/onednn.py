"""Calls of oneDNN's operators with packed weights through torch's C ABI, which has a function for each.

The dispatcher's stable ABI leaks a copy of every string (torch 2.13), and these operators take the names of what they
fuse. The copies lay between the large blocks that a call allocates and frees, which then never become one again: an
int8 BERT of 4 layers, 8 x 128 tokens, grew by 4 to 11 MB a call, nearly all of it free memory, and faulted it in.

The functions take what the operators' schemas say, each kind of argument in one way. Those of int8 calls exist for
activations whose scale and zero point are tensors; numbers are handed over as tensors of no dimension.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from torchkiln.codegen.llvm.frame import Frame
from torchkiln.ir.index import Index
from torchkiln.ir.program import ExternArgument, ExternCall, StridedView
from torchkiln.native.symbols import address_of, dtype_code, shim_constant

# Every operator with the function of the C ABI for it.
_FUNCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "mkldnn::_linear_pointwise": "aoti_torch_cpu__linear_pointwise",
        "mkldnn::_linear_pointwise.binary": "aoti_torch_cpu__linear_pointwise_binary",
        "mkldnn::_convolution_pointwise": "aoti_torch_cpu_mkldnn__convolution_pointwise",
        "mkldnn::_convolution_pointwise.binary": "aoti_torch_cpu_mkldnn__convolution_pointwise_binary",
        "mkldnn::_convolution_pointwise_.binary": "aoti_torch_cpu_mkldnn__convolution_pointwise_binary_",
        "mkldnn::_convolution_transpose_pointwise": "aoti_torch_cpu_mkldnn__convolution_transpose_pointwise",
        **{
            f"onednn::{name}{overload}": f"aoti_torch_cpu__{name}{suffix}"
            for name in ("qconv_pointwise", "qconv2d_pointwise", "qlinear_pointwise")
            for overload, suffix in (
                ("", "_tensor"),
                (".tensor", "_tensor"),
                (".binary", "_binary_tensor"),
                (".binary_tensor", "_binary_tensor"),
            )
        },
    }
)


def function_of(target: object) -> str | None:
    """The name of the C function for an operator, where there is one and this torch has it."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = _FUNCTIONS.get(target.name())
    return name if name is not None and address_of(name) is not None else None


def operands_of(frame: Frame, call: ExternCall) -> list[str]:
    """The typed operands of the C function for a call, in order, all but the result."""
    assert isinstance(call.target, torch._ops.OpOverload)
    arguments = zip(call.target._schema.arguments, call.arguments, strict=True)
    found: list[str] = []
    for declared, value in arguments:
        kind = declared.real_type
        if declared.name in _ACTIVATION and isinstance(value, (int, float)):
            found.append(_number_as_tensor(frame, value, _ACTIVATION[declared.name]))
        elif kind.kind() == "OptionalType":
            found.append(_optional(frame, kind.getElementType().kind(), value))
        elif kind.kind() == "ListType":
            found += _list(frame, kind.getElementType().kind(), value)
        else:
            found.append(_KINDS[kind.kind()](frame, value))
    return found


# Arguments of int8 calls that their functions take as tensors of these dtypes.
_ACTIVATION = {"x_scale": torch.float64, "x_zero_point": torch.int64}

_KINDS: Mapping[str, Callable[[Frame, Any], str]] = MappingProxyType(
    {
        "TensorType": lambda frame, value: f"ptr {frame.borrow(value)}",
        "IntType": lambda frame, value: f"i64 {frame.number(value)}",
        "FloatType": lambda frame, value: f"double 0x{_bits(value) & (2**64 - 1):016X}",
        "StringType": lambda frame, value: f"ptr {frame.module.string(value)}",
    }
)


def _bits(value: float) -> int:
    """A double as a signed integer of 64 bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _optional(frame: Frame, kind: str, value: ExternArgument) -> str:
    """A pointer to a value, or null."""
    if value is None:
        return "ptr null"
    if isinstance(value, (StridedView, str)):
        cell = frame.new_cells(1)
        frame.emit(f"store {_KINDS[kind](frame, value)}, ptr {cell}")
        return f"ptr {cell}"
    if isinstance(value, torch.dtype):
        return f"ptr {frame.module.words([dtype_code(value)])}"
    return f"ptr {_number(frame, value)}"


def _number(frame: Frame, value: Any) -> str:
    """The address of a number, which is a double there."""
    assert isinstance(value, (int, float))
    return frame.module.integers([_bits(value)])


def _list(frame: Frame, kind: str, values: Sequence[Any]) -> tuple[str, str]:
    """An array and its length: integers, or addresses of numbers."""
    if kind == "OptionalType":
        if not values:
            return "ptr null", "i64 0"
        cells = frame.new_cells(len(values))
        for k, value in enumerate(values):
            address = "null" if value is None else _number(frame, value)
            frame.emit(f"store ptr {address}, ptr {frame.element(cells, k)}")
        return f"ptr {cells}", f"i64 {len(values)}"
    assert all(isinstance(value, (int, Index)) for value in values)
    return f"ptr {frame.integers(values)}", f"i64 {len(values)}"


def _number_as_tensor(frame: Frame, value: float, dtype: torch.dtype) -> str:
    """A handle, good until the end of the step, of a tensor of one number that the code itself holds."""
    bits = int(value) if dtype == torch.int64 else _bits(value)
    slot = frame.temporary()
    frame.call(
        "aoti_torch_create_tensor_from_blob",
        f"ptr {frame.module.integers([bits])}, i64 0, ptr null, ptr null, i64 0, i32 {dtype_code(dtype)}, "
        f"i32 {shim_constant('aoti_torch_device_type_cpu')}, i32 0, ptr {slot}",
    )
    return f"ptr {frame.fresh(f'load ptr, ptr {slot}')}"
