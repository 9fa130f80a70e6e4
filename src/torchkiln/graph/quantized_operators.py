"""Operators of quantized models: quantize and dequantize as torch's PT2E flow writes them, and oneDNN's int8 calls.

The former are defined in Python when ``torch.ao`` or ``torchao`` is imported, so they are known by name here. The
latter come with torch. Those that pack weights have no fake implementation in torch; this module gives them one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import torch

from torchkiln.errors import NotPreparedError

NAMESPACE = "quantized_decomposed"
"""Where torch defines quantize, dequantize and the choice of scales."""


def operator_name(target: object) -> str:
    """``quantize_per_tensor`` or ``quantize_per_tensor.tensor`` for operators of :data:`NAMESPACE`, else empty."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != NAMESPACE:
        return ""
    return str(target.name()).partition("::")[2]


def onednn_operator(*names: str) -> torch._ops.OpOverload | None:
    """The first of ``names`` that this torch has, each with its overload: ``qconv_pointwise.default``."""
    if not torch.backends.mkldnn.is_available():
        return None
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.onednn, base, None)
        if packet is not None and overload in packet.overloads():
            found: torch._ops.OpOverload = getattr(packet, overload)
            return found
    return None


def _known_to_write(operator: torch._ops.OpOverload | None) -> torch._ops.OpOverload | None:
    """``operator`` where its schema says what it writes to. Before 2.13, that of the sum in place does not."""
    return operator if operator is not None and operator._schema.is_mutable else None


# Of the older names, that of two dimensions is in every version and serves images alone.
QCONV = onednn_operator("qconv_pointwise.default", "qconv2d_pointwise.default")
QCONV_SUM = _known_to_write(onednn_operator("qconv2d_pointwise.binary"))
QLINEAR = onednn_operator("qlinear_pointwise.default")
QLINEAR_TENSOR = onednn_operator("qlinear_pointwise.tensor")
QLINEAR_BINARY = onednn_operator("qlinear_pointwise.binary")
QLINEAR_BINARY_TENSOR = onednn_operator("qlinear_pointwise.binary_tensor")
QCONV_PREPACK = onednn_operator("qconv_prepack.default")
QLINEAR_PREPACK = onednn_operator("qlinear_prepack.default")

# -- fake implementations ---------------------------------------------------------------------------------------------


def _fake_convolution_weight(
    weight: torch.Tensor,
    w_scales: torch.Tensor,
    x_scale: float,
    x_zp: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    x_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _fake_linear_weight(weight: torch.Tensor, x_shape: Sequence[int] | None) -> torch.Tensor:
    return weight.new_empty((weight.shape[1], weight.shape[0]))  # oneDNN's is transposed


def _register_fake(target: torch._ops.OpOverload | None, fake: Callable[..., torch.Tensor]) -> None:
    if target is None or torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "Meta"):
        return
    with suppress(RuntimeError):  # somebody else gave it one
        torch.library.register_fake(target.name(), fake)


# -- weights without zero points --------------------------------------------------------------------------------------


def _require_zero(zero_points: torch.Tensor) -> torch.Tensor:
    """A copy of ``zero_points``; raises NotPreparedError unless all are 0.

    oneDNN's int8 calls take zero points of weights and ignore them. Only values tell whether a weight has any, and
    those are looked at where weights are packed.
    """
    if bool(zero_points.any()):
        raise NotPreparedError("an int8 weight has zero points other than 0, which oneDNN ignores")
    return zero_points.clone()


@cache
def _library() -> torch.library.Library:
    """Defines what this module adds to torch's operators, which stay as long as the library object does."""
    library = torch.library.Library("kiln", "FRAGMENT")
    library.define("require_zero(Tensor zero_points) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("require_zero", _require_zero, "CPU")
    torch.library.register_fake("kiln::require_zero", torch.empty_like, lib=library)
    _register_fake(QCONV_PREPACK, _fake_convolution_weight)
    _register_fake(QLINEAR_PREPACK, _fake_linear_weight)
    return library


_library()
REQUIRE_ZERO: torch._ops.OpOverload = torch.ops.kiln.require_zero.default
