"""Elementwise operators: arithmetic, comparison, logic, selection, conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchkiln.graph.dtypes import HALF
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, Scalar, literal, op, where
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.ops import COMPARISONS, OPS, named
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, compute_dtype
from torchkiln.lowering.promotion import Operand, promote, promote_to_float
from torchkiln.lowering.refusals import refuse
from torchkiln.lowering.registry import NotLowered, lowers
from torchkiln.lowering.views import broadcast_shapes, broadcast_to

Compute = Callable[..., Expr]


def elementwise(
    builder: Builder,
    operands: Sequence[Operand],
    compute: Compute,
    *,
    dtype: torch.dtype | None = None,
    compute_in: torch.dtype | None = None,
) -> TensorValue:
    """Broadcast ``operands``, convert them to ``compute_in`` (default: where ``dtype`` computes), apply.

    The result is of ``dtype``, by default the one that the operands promote to.
    """
    result = dtype or promote(builder, operands)
    inner = compute_in or compute_dtype(result)
    shape, operands = _broadcast(operands)
    return builder.pointwise(shape, result, lambda i: compute(*(_element(builder, o, i, inner) for o in operands)))


def formula(*names: str) -> Callable[[Compute], Compute]:
    """Register the formula of an element: tensors among the arguments arrive as elements, all else as it is given."""

    def register(compute: Compute) -> Compute:
        @lowers(*names)
        def lower(builder: Builder, *args: Any, **kwargs: Any) -> TensorValue:
            def element(*elements: Expr) -> Expr:
                given = iter(elements)
                return compute(*(next(given) if isinstance(a, TensorValue) else a for a in args), **kwargs)

            return elementwise(builder, [a for a in args if isinstance(a, TensorValue)], element)

        return compute

    return register


def _broadcast(operands: Sequence[Operand]) -> tuple[tuple[Extent, ...], list[Operand]]:
    shape = broadcast_shapes([o.shape for o in operands if isinstance(o, TensorValue)])
    return shape, [broadcast_to(o, shape) if isinstance(o, TensorValue) else o for o in operands]


def _element(builder: Builder, operand: Operand, subscripts: Subscripts, dtype: torch.dtype) -> Expr:
    return builder.load(operand, subscripts, dtype) if isinstance(operand, TensorValue) else number(operand, dtype)


def number(value: Scalar, dtype: torch.dtype) -> Expr:
    """A number that the user gave as a value of ``dtype``; NotLowered where eager wraps it or raises, by operator."""
    if isinstance(value, complex):
        raise NotLowered("complex number")
    if not isinstance(value, Expr) and not dtype.is_floating_point and dtype != torch.bool:
        if isinstance(value, float) and not math.isfinite(value):
            raise NotLowered("non-finite number in an integer operation")
        symbolic = isinstance(value, Index)
        low, high = value.bounds if isinstance(value, Index) else (int(value), int(value))
        info = torch.iinfo(dtype)
        if not (symbolic and dtype == torch.int64) and not (info.min <= low and high <= info.max):
            raise NotLowered(f"the number {value} may not fit {dtype}")
    return literal(value, dtype)


def as_bool(value: Expr) -> Expr:
    return value if value.dtype == torch.bool else value.ne(0)


def share(count: Extent, dtype: torch.dtype) -> Expr:
    """One part in ``count``, as a factor; 1 where there is nothing to share."""
    return literal(1.0 / max(count, 1), dtype) if isinstance(count, int) else 1.0 / literal(count, dtype)


# -- half types, which eager rounds to within an operator -------------------------------------------------------------


def rounded(builder: Builder, value: Expr, dtype: torch.dtype) -> Expr:
    """``value``, rounded where eager rounds within one operator to its half type."""
    return _rounded(value, dtype) if builder.exact_half else value


def _rounded(value: Expr, dtype: torch.dtype) -> Expr:
    """``value`` as a half type would hold it, still in the dtype it is computed in."""
    return ex.cast(ex.cast(value, dtype), value.dtype) if dtype in HALF else value


def rounded_number(builder: Builder, value: Any, dtype: torch.dtype) -> Any:
    """A number as the operators have it that convert it to the tensor's half type first (add, fmod, pow; not mul)."""
    return held(value, dtype) if builder.exact_half else value


def held(value: Any, dtype: torch.dtype) -> Any:
    """A number as eager holds it before computing: rounded where ``dtype`` is a half type."""
    if isinstance(value, (int, float)) and dtype in HALF:
        return float(torch.tensor(value, dtype=dtype).item())
    return value


# -- unary operators --------------------------------------------------------------------------------------------------


_ROUNDINGS = ("floor", "ceil", "trunc", "round")


def lower_unary(name: str, builder: Builder, x: TensorValue) -> TensorValue:
    """An operator that keeps the dtype. Rounding an integer changes nothing, nor does the sign of a bool."""
    if x.dtype == torch.bool and name != "sign":
        raise NotLowered(f"{name} of bool")
    unchanged = x.dtype == torch.bool or (name in _ROUNDINGS and not x.dtype.is_floating_point)
    return elementwise(builder, [x], (lambda a: a) if unchanged else partial(op, name))


for _name in ("neg", "abs", "sign", *_ROUNDINGS):
    lowers(_name)(partial(lower_unary, _name))


@formula("frac")
def frac(a: Expr) -> Expr:
    if not a.dtype.is_floating_point:
        raise NotLowered("frac of integers")  # an error in eager
    return a - op("trunc", a)


def lower_float_function(name: str, builder: Builder, x: TensorValue) -> TensorValue:
    """A function of floats. Integers become floats."""
    return elementwise(builder, [x], partial(op, name), dtype=promote_to_float(builder, [x]))


_MATH = (spec.name for spec in OPS.values() if (spec.kind, spec.arity) == ("math", 1))
for _name in (*_MATH, "sqrt", "rsqrt", "reciprocal"):
    lowers(_name)(partial(lower_float_function, _name))


@lowers("bitwise_not")
def lower_bitwise_not(builder: Builder, x: TensorValue) -> TensorValue:
    return elementwise(builder, [x], partial(op, "logical_not" if x.dtype == torch.bool else "bitwise_not"))


def lower_test(name: str, builder: Builder, x: TensorValue) -> TensorValue:
    """No integer is NaN or infinite, and no bool is negative."""
    possible = x.dtype != torch.bool if name == "signbit" else x.dtype.is_floating_point
    test = partial(op, name) if possible else lambda _: Constant(False, torch.bool)
    return elementwise(builder, [x], test, dtype=torch.bool, compute_in=compute_dtype(x.dtype))


for _name in sorted(named("test")):
    lowers(_name)(partial(lower_test, _name))


# -- binary arithmetic ------------------------------------------------------------------------------------------------


def lower_add(name: str, builder: Builder, x: Operand, y: Operand, alpha: float = 1) -> TensorValue:
    """``x + alpha * y``, or ``sub`` in place of the sum."""
    dtype = promote(builder, [x, y])
    if name == "sub" and torch.bool in (promote(builder, [x]), promote(builder, [y])):
        raise NotLowered("subtraction of bool")  # an error in eager
    if (isinstance(alpha, bool) and dtype != torch.bool) or (isinstance(alpha, float) and not dtype.is_floating_point):
        raise NotLowered(f"alpha {alpha} for {dtype}")  # an error in eager
    if dtype == torch.bool:
        if alpha != 1:
            raise NotLowered("bool arithmetic")
        return elementwise(builder, [x, y], partial(op, "logical_or"))
    factor = rounded_number(builder, alpha, dtype)

    def compute(a: Expr, b: Expr) -> Expr:
        return op(name, a, b if alpha == 1 else b * number(factor, b.dtype))

    return elementwise(builder, [rounded_number(builder, o, dtype) for o in (x, y)], compute, dtype=dtype)


lowers("add")(partial(lower_add, "add"))
lowers("sub")(partial(lower_add, "sub"))


@lowers("rsub")
def lower_rsub(builder: Builder, x: Operand, y: Operand, alpha: float = 1) -> TensorValue:
    return lower_add("sub", builder, y, x, alpha)


@lowers("div")
def lower_div(builder: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> TensorValue:
    if rounding_mode is None:
        return elementwise(builder, [x, y], partial(op, "div"), dtype=promote_to_float(builder, [x, y]))
    dtype = promote(builder, [x, y])
    x, y = _division_operands(builder, dtype, x, y)
    by_tensor = isinstance(y, TensorValue)  # by a number eager takes one step, and rounds nothing within
    if rounding_mode == "floor":
        in_steps = by_tensor and builder.exact_half and dtype in HALF
        compute: Compute = partial(_floor_divide_in_steps, dtype) if in_steps else partial(op, "floor_divide")
    elif dtype.is_floating_point:
        compute = partial(_truncated_quotient, dtype if by_tensor else None)
    else:
        compute = partial(op, "trunc_divide")
    return elementwise(builder, [x, y], compute, dtype=dtype)


def _truncated_quotient(rounds_to: torch.dtype | None, a: Expr, b: Expr) -> Expr:
    """Eager rounds to the half type before it truncates: 3 / 0.3008 is 10 and not 9 in bfloat16."""
    return op("trunc", a / b if rounds_to is None else _rounded(a / b, rounds_to))


def _floor_divide_in_steps(dtype: torch.dtype, a: Expr, b: Expr) -> Expr:
    """The floor of a quotient as eager computes it from the remainder, every step of it rounded to the half type."""

    def half(value: Expr) -> Expr:
        return _rounded(value, dtype)

    plain = half(a / b)
    rest = op("fmod", a, b)
    quotient = half(half(a - rest) / b)
    opposite = (b < 0) ^ (rest < 0)
    quotient = where(rest.ne(0) & opposite, half(quotient - 1), quotient)
    floor = op("floor", quotient)
    floor = where(half(quotient - floor) > 0.5, half(floor + 1), floor)
    result = where(quotient.ne(0), floor, op("copysign", literal(0, a.dtype), plain))
    # A quotient beyond the largest number is its own floor; its remainder is not to be had from the library.
    infinity = float("inf")
    beyond = op("abs", plain).eq(infinity) & (op("abs", a) < infinity)
    return where(beyond | b.eq(0), plain, result)


def _division_operands(builder: Builder, dtype: torch.dtype, x: Operand, y: Operand) -> tuple[Operand, Operand]:
    """What is divided by what. Of integers a divisor of zero raises, as in eager, before it is used."""
    if dtype.is_floating_point:
        return x, y
    if dtype == torch.bool:
        raise NotLowered("division of bool")  # an error in eager
    x, y = _wrapped(x, dtype), _wrapped(y, dtype)
    if isinstance(y, int):
        if y == 0:
            raise NotLowered("integer division by zero")  # an error in eager
        return x, y
    divisor, shape = y, y.shape if isinstance(y, TensorValue) else ()
    if isinstance(x, TensorValue) and isinstance(y, TensorValue):
        whole = broadcast_shapes([x.shape, y.shape])
        if ix.bounds_of(ix.product(whole))[0] < 1:  # where nothing is divided, eager looks at no divisor
            shape, divisor = whole, broadcast_to(y, whole)

    def is_zero(i: Subscripts) -> Expr:
        return _element(builder, divisor, i, dtype).eq(0)

    refuse(builder, shape, is_zero, "RuntimeError", "ZeroDivisionError")
    return x, y


def _wrapped(value: Operand, dtype: torch.dtype) -> Operand:
    """A number as the operators have it that wrap it to the tensor's integer type."""
    if isinstance(value, Index):
        return literal(value, dtype)
    if not isinstance(value, int):
        return value
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min


lowers("floor_divide")(partial(lower_div, rounding_mode="floor"))


def lower_remainder(name: str, builder: Builder, x: Operand, y: Operand) -> TensorValue:
    dtype = promote(builder, [x, y])
    operands = _division_operands(builder, dtype, x, y)
    return elementwise(builder, [rounded_number(builder, o, dtype) for o in operands], partial(op, name), dtype=dtype)


for _name in ("remainder", "fmod"):
    lowers(_name)(partial(lower_remainder, _name))


def lower_binary(name: str, on_bool: str | None, builder: Builder, x: Operand, y: Operand) -> TensorValue:
    """An operator that is one operation, another one ``on_bool``."""
    dtype = promote_to_float(builder, [x, y]) if name in ("atan2", "copysign") else promote(builder, [x, y])
    if dtype == torch.bool and on_bool is None:
        raise NotLowered(f"{name} of bool")
    used = on_bool if on_bool is not None and dtype == torch.bool else name
    return elementwise(builder, [x, y], partial(op, used), dtype=dtype)


for _name, _on_bool in (
    ("mul", "logical_and"),
    ("maximum", "logical_or"),
    ("minimum", "logical_and"),
    ("fmax", None),
    ("fmin", None),
    ("atan2", None),
    ("copysign", None),
    ("hypot", None),
    ("bitwise_and", "logical_and"),
    ("bitwise_or", "logical_or"),
    ("bitwise_xor", "logical_xor"),
):
    lowers(_name)(partial(lower_binary, _name, _on_bool))


@lowers("pow.Tensor_Scalar")
def lower_pow_scalar(builder: Builder, x: TensorValue, exponent: Operand) -> TensorValue:
    dtype = promote(builder, [x, exponent])
    if not isinstance(exponent, (int, float)):
        return lower_pow(builder, x, exponent)
    if not dtype.is_floating_point:
        if not isinstance(exponent, int) or not 0 <= exponent <= 8 or dtype == torch.bool:
            raise NotLowered("integer power")
        return elementwise(builder, [x], lambda a: _power(a, exponent), dtype=dtype)

    def step(value: Expr) -> Expr:
        return rounded(builder, value, dtype) if dtype == torch.bfloat16 else value

    def compute(a: Expr) -> Expr:
        # Eager special-cases exactly these exponents; the results agree bit for bit.
        if abs(exponent) == 0.5 and dtype != torch.float16:  # eager takes powers of float16: -0 becomes 0, -inf inf
            return op("sqrt" if exponent > 0 else "rsqrt", a)
        if exponent in (1, 2, 3):
            return step(a * a) * a if exponent == 3 else _power(a, int(exponent))
        if exponent in (-1, -2):
            return op("reciprocal", step(a * a) if exponent == -2 else a)
        return op("pow", a, literal(rounded_number(builder, exponent, dtype), a.dtype))

    return elementwise(builder, [x], compute, dtype=dtype)


def _power(base: Expr, exponent: int) -> Expr:
    return math.prod([base] * (exponent - 1), start=base) if exponent else literal(1, base.dtype)


@lowers("pow.Tensor_Tensor", "pow.Scalar")
def lower_pow(builder: Builder, x: Operand, y: Operand) -> TensorValue:
    if not promote(builder, [x, y]).is_floating_point:
        raise NotLowered("integer power")
    return elementwise(builder, [x, y], partial(op, "pow"))


@lowers("xlogy")
def lower_xlogy(builder: Builder, x: Operand, y: Operand) -> TensorValue:
    dtype = promote_to_float(builder, [x, y])

    def compute(a: Expr, b: Expr) -> Expr:
        found = where(a.eq(0), 0, a * rounded(builder, op("log", b), dtype))
        return where(op("isnan", b), b, found)

    return elementwise(builder, [rounded_number(builder, o, dtype) for o in (x, y)], compute, dtype=dtype)


# -- comparison and logic ---------------------------------------------------------------------------------------------


def lower_comparison(name: str, builder: Builder, x: Operand, y: Operand) -> TensorValue:
    common = promote(builder, [x, y])
    if isinstance(y, (int, float)) and not isinstance(y, bool) and not common.is_floating_point:
        info = torch.iinfo(common if common != torch.bool else torch.uint8)
        if not info.min <= y <= info.max:
            raise NotLowered("comparison with a number outside the tensor's range")
    operands = [x, held(y, common)]  # eager compares in the tensor's own precision
    return elementwise(builder, operands, partial(op, name), dtype=torch.bool, compute_in=compute_dtype(common))


for _name in sorted(COMPARISONS):
    lowers(_name)(partial(lower_comparison, _name))


def lower_logical(name: str, builder: Builder, *operands: TensorValue) -> TensorValue:
    shape, wide = _broadcast(operands)

    def element(i: Subscripts) -> Expr:
        types = (compute_dtype(o.dtype) for o in operands)
        return op(name, *(as_bool(_element(builder, o, i, dtype)) for o, dtype in zip(wide, types, strict=True)))

    return builder.pointwise(shape, torch.bool, element)


for _name in sorted(named("logic")):
    lowers(_name)(partial(lower_logical, _name))


# -- selection --------------------------------------------------------------------------------------------------------


@lowers("where")
def lower_where(builder: Builder, condition: TensorValue, x: Operand, y: Operand) -> TensorValue:
    return _selected(builder, condition, x, y, promote(builder, [x, y]))


@lowers("masked_fill")
def lower_masked_fill(builder: Builder, x: TensorValue, mask: TensorValue, value: Operand) -> TensorValue:
    return _selected(builder, mask, value, x, x.dtype)


def _selected(builder: Builder, condition: TensorValue, x: Operand, y: Operand, dtype: torch.dtype) -> TensorValue:
    shape, (chosen, *sides) = _broadcast([condition, x, y])

    def element(i: Subscripts) -> Expr:
        yes, no = (_element(builder, side, i, dtype) for side in sides)
        return where(as_bool(_element(builder, chosen, i, condition.dtype)), yes, no)

    return builder.pointwise(shape, dtype, element)


@lowers("clamp", "clamp_min")
def lower_clamp(
    builder: Builder, x: TensorValue, min: Operand | None = None, max: Operand | None = None  # noqa: A002
) -> TensorValue:
    bounds = {is_low: bound for is_low, bound in ((True, min), (False, max)) if bound is not None}
    dtype = promote(builder, [x, *bounds.values()])
    if dtype == torch.bool:
        raise NotLowered("clamp of bool")

    def compute(value: Expr, *limits: Expr) -> Expr:
        for is_low, limit in zip(bounds, limits, strict=True):
            value = clamped(value, limit, is_low=is_low)
        return value

    return elementwise(builder, [x, *(held(bound, dtype) for bound in bounds.values())], compute, dtype=dtype)


@lowers("clamp_max")
def lower_clamp_max(builder: Builder, x: TensorValue, max: Operand) -> TensorValue:  # noqa: A002
    return lower_clamp(builder, x, None, max)


def clamped(value: Expr, bound: Expr, *, is_low: bool) -> Expr:
    """``value``, or ``bound`` beyond it. A number as bound leaves a zero of either sign alone, as eager does."""
    if isinstance(bound, Constant) and bound.dtype.is_floating_point and not math.isnan(bound.value):
        return where(value < bound if is_low else value > bound, bound, value)
    return op("maximum" if is_low else "minimum", value, bound)


# -- conversion -------------------------------------------------------------------------------------------------------


@lowers("_to_copy")
def lower_to_copy(builder: Builder, x: TensorValue, *, dtype: torch.dtype | None = None, **kwargs: Any) -> TensorValue:
    return lower_convert(builder, x, dtype or x.dtype)


@lowers("convert_element_type")
def lower_convert(builder: Builder, x: TensorValue, dtype: torch.dtype) -> TensorValue:
    return builder.pointwise(x.shape, dtype, lambda i: ex.cast(x.at(i), dtype))


@lowers("copy")
def lower_copy(builder: Builder, x: TensorValue, source: TensorValue, non_blocking: bool = False) -> TensorValue:
    return lower_convert(builder, broadcast_to(source, x.shape), x.dtype)


@lowers("clone", "lift_fresh_copy", "alias_copy")
def lower_clone(builder: Builder, x: TensorValue, *, memory_format: torch.memory_format | None = None) -> TensorValue:
    return builder.pointwise(x.shape, x.dtype, x.at)


# -- several operations -----------------------------------------------------------------------------------------------


def _addc(name: str, u: Expr, v: Expr, w: Expr, *, value: float = 1) -> Expr:
    if not u.dtype.is_floating_point:
        raise NotLowered("integer addcmul")
    return u + op(name, v if value == 1 else v * value, w)


for _name in ("mul", "div"):
    formula(f"addc{_name}")(partial(_addc, _name))


@lowers("lerp")
def lower_lerp(builder: Builder, start: TensorValue, end: TensorValue, weight: Operand) -> TensorValue:
    def compute(s: Expr, e: Expr, w: Expr) -> Expr:
        # Which end the interpolation starts from depends on the weight, so that both ends are hit exactly.
        distance = e - s
        return where(op("abs", w) < 0.5, s + w * distance, e - distance * (1 - w))

    return elementwise(builder, [start, end, weight], compute, dtype=promote(builder, [start, end]))


@lowers("native_dropout_backward")
def lower_dropout_backward(builder: Builder, grad: TensorValue, mask: TensorValue, scale: float) -> TensorValue:
    dtype = promote(builder, [grad, mask, float(scale)])
    return elementwise(builder, [grad, mask], lambda g, m: g * m * scale, dtype=dtype)
