"""Fake values of library operators that have no fake kernel in torch, or one that is wrong about strides.

torch has none for the operators that pack weights, nor for those that add a second tensor, and that of a transposed
convolution says row-major where the library writes its channels last. These are looked up here instead of being
registered with torch, so that no other compiler of the process meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

Tensor = torch.Tensor
OpOverload = torch._ops.OpOverload


def fake_kernel(target: Any) -> Callable[..., Any]:
    """What to call for the fake value of a call of ``target``: itself, for nearly all."""
    found: Callable[..., Any] = _kernels().get(target, target)
    return found


def channels_last_strides(shape: Sequence[Any]) -> list[Any]:
    """The strides of a batch of images, or of volumes, with the channels innermost."""
    strides: list[Any] = [1] * len(shape)
    expected = shape[1]
    for dim in reversed(range(2, len(shape))):
        strides[dim], expected = expected, expected * shape[dim]
    strides[0] = expected
    return strides


def empty_channels_last(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """A tensor of ``shape`` with its channels innermost, of the dtype and on the device of ``like``."""
    return like.new_empty_strided(tuple(shape), tuple(channels_last_strides(shape)))


def _packed_like(weight: Tensor, *_layout: Any) -> Tensor:
    return weight.new_empty(weight.shape)


def _packed_transposed(
    weight: Tensor, _padding: Any, _output_padding: Any, _stride: Any, _dilation: Any, groups: int, *_layout: Any
) -> Tensor:
    """The library has the channels that a convolution gives first, as of one that is not transposed."""
    inputs, outputs, *window = weight.shape
    return weight.new_empty((outputs * groups, inputs // groups, *window))


def _convolution(
    x: Tensor, weight: Tensor, _bias: Any, padding: Any, stride: Any, dilation: Any, *_rest: Any
) -> Tensor:
    geometry = zip(x.shape[2:], weight.shape[2:], padding, stride, dilation, strict=True)
    sizes = [(n + 2 * pad - far * (window - 1) - 1) // step + 1 for n, window, pad, step, far in geometry]
    return empty_channels_last(x, (x.shape[0], weight.shape[0], *sizes))


def _convolution_transpose(
    x: Tensor, weight: Tensor, _bias: Any, padding: Any, output_padding: Any, stride: Any, dilation: Any, *_rest: Any
) -> Tensor:
    geometry = zip(x.shape[2:], weight.shape[2:], padding, output_padding, stride, dilation, strict=True)
    sizes = [(n - 1) * step - 2 * pad + far * (window - 1) + more + 1 for n, window, pad, more, step, far in geometry]
    return empty_channels_last(x, (x.shape[0], weight.shape[0], *sizes))


def _convolution_binary(x: Tensor, _other: Tensor, *rest: Any) -> Tensor:
    return _convolution(x, *rest)


def _convolution_into(other: Tensor, *_rest: Any) -> Tensor:
    return other


def _linear(x: Tensor, weight: Tensor, *_rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _linear_binary(x: Tensor, _other: Tensor, weight: Tensor, *_rest: Any) -> Tensor:
    return _linear(x, weight)


_KERNELS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "mkldnn::_reorder_convolution_weight.default": _packed_like,
        "mkldnn::_reorder_convolution_transpose_weight.default": _packed_transposed,
        "mkldnn::_reorder_linear_weight.default": _packed_like,
        "mkl::_mkl_reorder_linear_weight.default": _packed_like,
        "mkldnn::_convolution_pointwise.default": _convolution,
        "mkldnn::_convolution_pointwise.binary": _convolution_binary,
        "mkldnn::_convolution_pointwise_.binary": _convolution_into,
        "mkldnn::_convolution_transpose_pointwise.default": _convolution_transpose,
        "mkldnn::_linear_pointwise.default": _linear,
        "mkldnn::_linear_pointwise.binary": _linear_binary,
    }
)


@cache
def _kernels() -> Mapping[OpOverload, Callable[..., Tensor]]:
    """By operator, those that the installed torch has."""
    found = ((operator_named(name), kernel) for name, kernel in _KERNELS.items())
    return MappingProxyType({target: kernel for target, kernel in found if target is not None})


def operator_named(name: str) -> OpOverload | None:
    """The operator of a ``namespace::name.overload``; None where the installed torch has none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return getattr(packet, overload, None) if packet is not None else None
