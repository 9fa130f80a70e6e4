"""Activations and gradients of them that a decomposition would answer differently from eager at the edges.

Eager's vector kernels let a NaN in the input through, or stop it, by which side of a comparison is the default. Each
function below puts the default on the side where eager has it. Bounds are numbers of the tensor's own dtype.
"""

from __future__ import annotations

import torch

from torchkiln.ir.expr import Expr
from torchkiln.lowering.builder import Builder, TensorValue
from torchkiln.lowering.pointwise import compare, elementwise, held, literal, op, where
from torchkiln.lowering.promotion import promote, promote_to_float
from torchkiln.lowering.registry import lowers


@lowers("hardtanh_backward.default")
def lower_hardtanh_backward(
    builder: Builder, grad: TensorValue, x: TensorValue, low: float, high: float
) -> TensorValue:
    """Zero outside of the bounds, on them, and at NaN."""

    def compute(g: Expr, a: Expr) -> Expr:
        inside = op("logical_and", compare("gt", a, literal(low, a)), compare("lt", a, literal(high, a)))
        return where(inside, g, literal(0, g))

    return elementwise(builder, [grad, x], compute, dtype=promote([grad, x]))


@lowers("elu_backward.default")
def lower_elu_backward(
    builder: Builder,
    grad: TensorValue,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    x: TensorValue,
) -> TensorValue:
    """``x`` is the result of the forward where ``is_result``, else its input. NaN counts as negative."""
    negative = alpha * scale

    def compute(g: Expr, a: Expr) -> Expr:
        if is_result:
            below = op("mul", op("mul", g, literal(input_scale, g)), op("add", a, literal(negative, a)))
        else:
            power = op("exp", op("mul", a, literal(input_scale, a)))
            below = op("mul", op("mul", g, literal(input_scale * negative, g)), power)
        return where(compare("gt", a, literal(0, a)), op("mul", g, literal(scale, g)), below)

    return elementwise(builder, [grad, x], compute, dtype=promote([grad, x]))


@lowers("hardswish_backward.default")
def lower_hardswish_backward(builder: Builder, grad: TensorValue, x: TensorValue) -> TensorValue:
    def compute(g: Expr, a: Expr) -> Expr:
        slope = op("add", op("div", a, literal(3, a)), literal(0.5, a))
        inner = where(compare("ge", a, literal(3, a)), g, op("mul", g, slope))
        return where(compare("le", a, literal(-3, a)), literal(0, g), inner)

    return elementwise(builder, [grad, x], compute, dtype=promote([grad, x]))


def _logit_bounds(eps: float, dtype: torch.dtype, like: Expr) -> tuple[Expr, Expr]:
    low = held(eps, dtype)
    assert isinstance(low, (int, float))
    high = held(1.0 - low, dtype)
    assert isinstance(high, (int, float))
    return literal(low, like), literal(high, like)


@lowers("logit.default")
def lower_logit(builder: Builder, x: TensorValue, eps: float | None = None) -> TensorValue:
    dtype = promote_to_float([x])

    def compute(a: Expr) -> Expr:
        if eps is not None:
            low, high = _logit_bounds(eps, dtype, a)
            a = where(compare("lt", a, low), low, where(compare("gt", a, high), high, a))
        return op("log", op("div", a, op("sub", literal(1, a), a)))

    return elementwise(builder, [x], compute, dtype=dtype)


@lowers("logit_backward.default")
def lower_logit_backward(builder: Builder, grad: TensorValue, x: TensorValue, eps: float | None = None) -> TensorValue:
    dtype = promote([grad, x])

    def compute(g: Expr, a: Expr) -> Expr:
        low, high = (literal(0, a), literal(1, a)) if eps is None else _logit_bounds(eps, dtype, a)
        inside = op("logical_and", compare("ge", a, low), compare("le", a, high))
        slope = op("mul", a, op("sub", literal(1, a), a))
        return where(inside, op("div", g, slope), literal(float("nan") if eps is None else 0.0, g))

    return elementwise(builder, [grad, x], compute, dtype=dtype)
