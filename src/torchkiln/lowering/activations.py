"""Activations and their gradients, as formulas of an element.

Eager's vector kernels let a NaN in the input through, or stop it, by which side of a comparison is the default. Each
formula puts the default on the side where eager has it. Bounds are numbers of the tensor's own dtype.
"""

from __future__ import annotations

import math

import torch

from torchkiln.graph.dtypes import HALF
from torchkiln.ir.expr import Expr, literal, op, where
from torchkiln.lowering.builder import Builder, TensorValue
from torchkiln.lowering.pointwise import clamped, elementwise, formula, held, rounded
from torchkiln.lowering.promotion import promote, promote_to_float
from torchkiln.lowering.registry import NotLowered, lowers

_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_GELU_CUBIC = 0.044715


@formula("relu")
def relu(a: Expr) -> Expr:
    if a.dtype == torch.bool:
        raise NotLowered("relu of bool")  # an error in eager
    return clamped(a, literal(0, a.dtype), is_low=True)


# threshold_backward is not here: decomposed, it reads a mask, and forward can save that, a byte for each element.


@formula("leaky_relu")
def leaky_relu(a: Expr, negative_slope: float = 0.01) -> Expr:
    return where(a > 0, a, a * negative_slope)


@formula("gelu")
def gelu(a: Expr, *, approximate: str = "none") -> Expr:
    curve = op("tanh", _gelu_inner(a)) if approximate == "tanh" else op("erf", a * _SQRT_HALF)
    return a * 0.5 * (curve + 1)


def _gelu_inner(a: Expr) -> Expr:
    return (a + a * a * a * _GELU_CUBIC) * _SQRT_2_OVER_PI


@formula("gelu_backward")
def gelu_backward(g: Expr, a: Expr, *, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        t = op("tanh", _gelu_inner(a))
        slope = (a * a * (3 * _GELU_CUBIC) + 1) * _SQRT_2_OVER_PI
        return g * ((t + 1) * 0.5 + (1 - t * t) * slope * (a * 0.5))
    cdf = (op("erf", a * _SQRT_HALF) + 1) * 0.5
    pdf = op("exp", a * a * -0.5) * _INV_SQRT_2PI
    return g * (cdf + a * pdf)


@lowers("silu")
def lower_silu(builder: Builder, x: TensorValue) -> TensorValue:
    def compute(a: Expr) -> Expr:
        if builder.exact_half and x.dtype in HALF:  # eager's way, which rounds to another half now and then
            return a / (op("exp", -a) + 1)
        return a * op("sigmoid", a)

    return elementwise(builder, [x], compute)


@formula("silu_backward")
def silu_backward(g: Expr, a: Expr) -> Expr:
    s = op("sigmoid", a)
    return g * s * (a * (1 - s) + 1)


@formula("sigmoid_backward")
def sigmoid_backward(g: Expr, s: Expr) -> Expr:
    return g * (1 - s) * s


@formula("tanh_backward")
def tanh_backward(g: Expr, t: Expr) -> Expr:
    return g * (1 - t * t)


@formula("hardtanh_backward")
def hardtanh_backward(g: Expr, a: Expr, low: float, high: float) -> Expr:
    """Zero outside of the bounds, on them, and at NaN."""
    return where((a > low) & (a < high), g, 0)


@formula("elu_backward")
def elu_backward(g: Expr, alpha: float, scale: float, input_scale: float, is_result: bool, a: Expr) -> Expr:
    """``a`` is the result of the forward where ``is_result``, else its input. NaN counts as negative."""
    negative = alpha * scale
    if is_result:
        below = g * input_scale * (a + negative)
    else:
        below = g * (input_scale * negative) * op("exp", a * input_scale)
    return where(a > 0, g * scale, below)


@formula("hardswish_backward")
def hardswish_backward(g: Expr, a: Expr) -> Expr:
    return where(a <= -3, 0, where(a >= 3, g, g * (a / 3 + 0.5)))


def _logit_bounds(eps: float, dtype: torch.dtype) -> tuple[float, float]:
    low = held(eps, dtype)
    return low, held(1.0 - low, dtype)


@lowers("logit")
def lower_logit(builder: Builder, x: TensorValue, eps: float | None = None) -> TensorValue:
    dtype = promote_to_float(builder, [x])

    def compute(a: Expr) -> Expr:
        if eps is not None:
            low, high = _logit_bounds(eps, dtype)
            a = where(a < low, low, where(a > high, high, a))
        return op("log", rounded(builder, a / rounded(builder, 1 - a, dtype), dtype))

    return elementwise(builder, [x], compute, dtype=dtype)


@lowers("logit_backward")
def lower_logit_backward(builder: Builder, grad: TensorValue, x: TensorValue, eps: float | None = None) -> TensorValue:
    low, high = (0, 1) if eps is None else _logit_bounds(eps, promote(builder, [grad, x]))

    def compute(g: Expr, a: Expr) -> Expr:
        return where((a >= low) & (a <= high), g / (a * (1 - a)), math.nan if eps is None else 0.0)

    return elementwise(builder, [grad, x], compute)
