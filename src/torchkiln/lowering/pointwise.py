"""Elementwise operators: arithmetic, comparison, logic, activations, selection, conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.ops import COMPARISONS, OPS
from torchkiln.lowering.builder import HALF, Builder, TensorValue, compute_dtype
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
    dtype: torch.dtype,
    compute_in: torch.dtype | None = None,
) -> TensorValue:
    """Broadcast ``operands``, convert them to ``compute_in`` (default: where ``dtype`` computes), apply."""
    inner = compute_in or compute_dtype(dtype)
    shape = broadcast_shapes([o.shape for o in operands if isinstance(o, TensorValue)])
    widened = [broadcast_to(o, shape) if isinstance(o, TensorValue) else o for o in operands]

    def element(subscripts: tuple[Index, ...]) -> Expr:
        values = [
            builder.load(o, subscripts, inner) if isinstance(o, TensorValue) else number(o, inner) for o in widened
        ]
        return compute(*values)

    return builder.pointwise(shape, dtype, element)


def number(value: bool | int | float | Index | Expr, dtype: torch.dtype) -> Expr:
    """A Python number, or one known only at run time, as a value of ``dtype``."""
    if isinstance(value, Expr):
        return ex.cast(value, dtype)
    if isinstance(value, Index):
        if not dtype.is_floating_point and dtype not in (torch.bool, torch.int64) and not _fits(value, dtype):
            raise NotLowered(f"the number {value} may not fit {dtype}")  # where it does not, eager raises
        return ex.cast(IndexValue(value, torch.int64), dtype)
    if isinstance(value, complex):
        raise NotLowered("complex number")
    if dtype == torch.bool:
        return Constant(bool(value), dtype)
    if dtype.is_floating_point:
        return Constant(float(value), dtype)
    if isinstance(value, float) and not math.isfinite(value):
        raise NotLowered("non-finite number in an integer operation")
    info = torch.iinfo(dtype)
    if not info.min <= int(value) <= info.max:
        raise NotLowered(f"the number {value} does not fit {dtype}")  # eager wraps it or raises, by operator
    return Constant(int(value), dtype)


def _fits(value: Index, dtype: torch.dtype) -> bool:
    info = torch.iinfo(dtype)
    return info.min <= value.bounds[0] and value.bounds[1] <= info.max


def op(name: str, *args: Expr, dtype: torch.dtype | None = None) -> Expr:
    """An operation on operands of one dtype; the result has that dtype unless told otherwise."""
    return ex.simplify(name, args, dtype or args[0].dtype)


def compare(name: str, left: Expr, right: Expr) -> Expr:
    return op(name, left, right, dtype=torch.bool)


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return ex.simplify("where", (condition, yes, no), yes.dtype)


def literal(value: float | Index, like: Expr) -> Expr:
    return number(value, like.dtype)


def share(count: Extent, like: Expr) -> Expr:
    """One part in ``count``, as a factor; 1 where there is nothing to share."""
    if isinstance(count, int):
        return literal(1.0 / max(count, 1), like)
    return op("div", literal(1.0, like), literal(count, like))


def rounded_number(builder: Builder, value: Any, dtype: torch.dtype) -> Any:
    """A number as the operators have it that convert it to the tensor's half type first (add, fmod, pow; not mul)."""
    return held(value, dtype) if builder.exact_half else value


def rounded(builder: Builder, value: Expr, dtype: torch.dtype) -> Expr:
    """``value``, rounded where eager rounds within one operator to its half type."""
    if not builder.exact_half or dtype not in HALF:
        return value
    return ex.cast(ex.cast(value, dtype), value.dtype)


# -- unary operators that keep the dtype ----------------------------------------------------------------------


def _same_dtype(name: str, *, integers: bool = True) -> None:
    @lowers(name)
    def lower(builder: Builder, x: TensorValue, **kwargs: Any) -> TensorValue:
        if x.dtype == torch.bool and name == "sign":
            return elementwise(builder, [x], lambda a: a, dtype=x.dtype)
        if x.dtype == torch.bool or kwargs:
            raise NotLowered(f"{name} of bool")
        if not x.dtype.is_floating_point and not integers:
            return elementwise(builder, [x], lambda a: a, dtype=x.dtype)  # rounding an integer changes nothing
        return elementwise(builder, [x], lambda a: op(name, a), dtype=x.dtype)


for _name in ("neg", "abs", "sign"):
    _same_dtype(_name)
for _name in ("floor", "ceil", "trunc"):
    _same_dtype(_name, integers=False)


@lowers("round.default")
def lower_round(builder: Builder, x: TensorValue) -> TensorValue:
    if x.dtype == torch.bool:
        raise NotLowered("round of bool")  # an error in eager
    if not x.dtype.is_floating_point:
        return elementwise(builder, [x], lambda a: a, dtype=x.dtype)
    return elementwise(builder, [x], lambda a: op("round", a), dtype=x.dtype)


@lowers("frac.default")
def lower_frac(builder: Builder, x: TensorValue) -> TensorValue:
    if not x.dtype.is_floating_point:
        raise NotLowered("frac of integers")  # an error in eager
    return elementwise(builder, [x], lambda a: op("sub", a, op("trunc", a)), dtype=x.dtype)


# -- unary float functions: integers become float ---------------------------------------------------------------


_ROOTS = ("sqrt", "rsqrt", "reciprocal")


def _float_function(name: str, compute: Callable[[Expr], Expr] | None = None) -> None:
    @lowers(f"{name}.default")
    def lower(builder: Builder, x: TensorValue) -> TensorValue:
        return elementwise(builder, [x], compute or (lambda a: op(name, a)), dtype=promote_to_float([x]))


for _name in (*(spec.name for spec in OPS.values() if (spec.kind, spec.arity) == ("math", 1)), *_ROOTS):
    _float_function(_name)


# -- binary arithmetic --------------------------------------------------------------------------------------------


def _is_bool(operand: Operand) -> bool:
    return promote([operand]) == torch.bool


def _with_alpha(name: str) -> Callable[..., TensorValue]:
    def lower(builder: Builder, x: Operand, y: Operand, alpha: float = 1) -> TensorValue:
        dtype = promote([x, y])
        if name == "sub" and (_is_bool(x) or _is_bool(y)):
            raise NotLowered("subtraction of bool")  # an error in eager
        if (isinstance(alpha, bool) and dtype != torch.bool) or (
            isinstance(alpha, float) and not dtype.is_floating_point
        ):
            raise NotLowered(f"alpha {alpha} for {dtype}")  # an error in eager
        if dtype == torch.bool:
            if alpha != 1:
                raise NotLowered("bool arithmetic")
            return elementwise(builder, [x, y], lambda a, b: op("logical_or", a, b), dtype=dtype)

        factor = rounded_number(builder, alpha, dtype)

        def compute(a: Expr, b: Expr) -> Expr:
            return op(name, a, b if alpha == 1 else op("mul", b, literal(factor, b)))

        operands = [rounded_number(builder, operand, dtype) for operand in (x, y)]
        return elementwise(builder, operands, compute, dtype=dtype)

    return lower


lowers("add.Tensor", "add.Scalar")(_with_alpha("add"))
lowers("sub.Tensor", "sub.Scalar")(_with_alpha("sub"))


@lowers("rsub.Tensor", "rsub.Scalar")
def lower_rsub(builder: Builder, x: Operand, y: Operand, alpha: float = 1) -> TensorValue:
    return _with_alpha("sub")(builder, y, x, alpha)


@lowers("mul.Tensor", "mul.Scalar")
def lower_mul(builder: Builder, x: Operand, y: Operand) -> TensorValue:
    dtype = promote([x, y])
    name = "logical_and" if dtype == torch.bool else "mul"
    return elementwise(builder, [x, y], lambda a, b: op(name, a, b), dtype=dtype)


@lowers("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def lower_div(builder: Builder, x: Operand, y: Operand, rounding_mode: str | None = None) -> TensorValue:
    if rounding_mode is None:
        return elementwise(builder, [x, y], lambda a, b: op("div", a, b), dtype=promote_to_float([x, y]))
    dtype = promote([x, y])
    x, y = _division_operands(builder, dtype, x, y)
    if rounding_mode == "floor":
        if builder.exact_half and dtype in HALF and isinstance(y, TensorValue):  # by a number it takes one step
            return elementwise(builder, [x, y], lambda a, b: _floor_divide_in_steps(builder, a, b, dtype), dtype=dtype)
        return elementwise(builder, [x, y], lambda a, b: op("floor_divide", a, b), dtype=dtype)
    if dtype.is_floating_point:

        def truncated(a: Expr, b: Expr) -> Expr:
            # Eager rounds the quotient to the half type before it truncates: 3 / 0.3008 is 10 and not 9 in bfloat16.
            quotient = op("div", a, b)
            return op("trunc", _rounded(quotient, dtype) if isinstance(y, TensorValue) else quotient)

        return elementwise(builder, [x, y], truncated, dtype=dtype)
    return elementwise(builder, [x, y], lambda a, b: op("trunc_divide", a, b), dtype=dtype)


def _rounded(value: Expr, dtype: torch.dtype) -> Expr:
    """``value`` as a half type would hold it, still in the dtype it is computed in."""
    return ex.cast(ex.cast(value, dtype), value.dtype) if dtype in HALF else value


def held(value: Operand, dtype: torch.dtype) -> Operand:
    """A number as eager holds it before computing: rounded where ``dtype`` is a half type."""
    if isinstance(value, (int, float)) and dtype in HALF:
        return float(torch.tensor(value, dtype=dtype).item())
    return value


def _floor_divide_in_steps(builder: Builder, a: Expr, b: Expr, dtype: torch.dtype) -> Expr:
    """The floor of a quotient as eager computes it from the remainder, every step of it rounded to the half type."""

    def half(value: Expr) -> Expr:
        return rounded(builder, value, dtype)

    zero, plain = literal(0, a), half(op("div", a, b))
    rest = op("fmod", a, b)
    quotient = half(op("div", half(op("sub", a, rest)), b))
    opposite = op("logical_xor", compare("lt", b, zero), compare("lt", rest, zero))
    adjust = op("logical_and", compare("ne", rest, zero), opposite)
    quotient = where(adjust, half(op("sub", quotient, literal(1, a))), quotient)
    floor = op("floor", quotient)
    above = compare("gt", half(op("sub", quotient, floor)), literal(0.5, a))
    floor = where(above, half(op("add", floor, literal(1, a))), floor)
    result = where(compare("ne", quotient, zero), floor, op("copysign", zero, plain))
    # A quotient beyond the largest number is its own floor; its remainder is not to be had from the library.
    infinity = literal(float("inf"), a)
    beyond = op("logical_and", compare("eq", op("abs", plain), infinity), compare("lt", op("abs", a), infinity))
    return where(op("logical_or", beyond, compare("eq", b, zero)), plain, result)


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
    shape: tuple[Extent, ...] = ()
    divisor = y
    if isinstance(y, TensorValue):
        shape = y.shape
        if isinstance(x, TensorValue):
            whole = broadcast_shapes([x.shape, y.shape])
            if ix.bounds_of(ix.product(whole))[0] < 1:  # where nothing is divided, eager looks at no divisor
                shape, divisor = whole, broadcast_to(y, whole)

    def is_zero(i: tuple[Index, ...]) -> Expr:
        value = builder.load(divisor, i, dtype) if isinstance(divisor, TensorValue) else number(divisor, dtype)
        return compare("eq", value, literal(0, value))

    refuse(builder, shape, is_zero, "RuntimeError", "ZeroDivisionError")
    return x, y


def _wrapped(value: Operand, dtype: torch.dtype) -> Operand:
    """A number as the operators have it that wrap it to the tensor's integer type."""
    if isinstance(value, Index):
        return ex.cast(IndexValue(value, torch.int64), dtype)
    if not isinstance(value, int):
        return value
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min


@lowers("floor_divide.default", "floor_divide.Scalar")
def lower_floor_divide(builder: Builder, x: Operand, y: Operand) -> TensorValue:
    return lower_div(builder, x, y, rounding_mode="floor")


def lower_remainder(name: str, builder: Builder, x: Operand, y: Operand) -> TensorValue:
    dtype = promote([x, y])
    x, y = _division_operands(builder, dtype, x, y)
    operands = [rounded_number(builder, operand, dtype) for operand in (x, y)]
    return elementwise(builder, operands, lambda a, b: op(name, a, b), dtype=dtype)


lowers("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")(partial(lower_remainder, "remainder"))
lowers("fmod.Tensor", "fmod.Scalar")(partial(lower_remainder, "fmod"))


def _binary(name: str, *aten: str, to_float: bool = False, bool_as: str | None = None) -> None:
    @lowers(*aten)
    def lower(builder: Builder, x: Operand, y: Operand) -> TensorValue:
        dtype = promote_to_float([x, y]) if to_float else promote([x, y])
        actual = name
        if dtype == torch.bool:
            if bool_as is None:
                raise NotLowered(f"{name} of bool")
            actual = bool_as
        return elementwise(builder, [x, y], lambda a, b: op(actual, a, b), dtype=dtype)


_binary("maximum", "maximum.default", bool_as="logical_or")
_binary("minimum", "minimum.default", bool_as="logical_and")
_binary("fmax", "fmax.default")
_binary("fmin", "fmin.default")
_binary("atan2", "atan2.default", to_float=True)
_binary("copysign", "copysign.Tensor", to_float=True)
_binary("hypot", "hypot.default")
_binary("bitwise_and", "bitwise_and.Tensor", "bitwise_and.Scalar", bool_as="logical_and")
_binary("bitwise_or", "bitwise_or.Tensor", "bitwise_or.Scalar", bool_as="logical_or")
_binary("bitwise_xor", "bitwise_xor.Tensor", "bitwise_xor.Scalar", bool_as="logical_xor")


@lowers("bitwise_not.default")
def lower_bitwise_not(builder: Builder, x: TensorValue) -> TensorValue:
    name = "logical_not" if x.dtype == torch.bool else "bitwise_not"
    return elementwise(builder, [x], lambda a: op(name, a), dtype=x.dtype)


@lowers("pow.Tensor_Scalar")
def lower_pow_scalar(builder: Builder, x: TensorValue, exponent: Operand) -> TensorValue:
    dtype = promote([x, exponent])
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
        if abs(exponent) == 0.5 and dtype != torch.float16:  # of which it takes powers: -0 becomes 0, -inf inf
            return op("sqrt" if exponent > 0 else "rsqrt", a)
        if exponent in (1, 2, 3):
            return op("mul", step(op("mul", a, a)), a) if exponent == 3 else _power(a, int(exponent))
        if exponent in (-1, -2):
            return op("reciprocal", step(_power(a, -int(exponent))) if exponent == -2 else a)
        return op("pow", a, literal(rounded_number(builder, exponent, dtype), a))

    return elementwise(builder, [x], compute, dtype=dtype)


def _power(base: Expr, exponent: int) -> Expr:
    if exponent == 0:
        return literal(1, base)
    result = base
    for _ in range(exponent - 1):
        result = op("mul", result, base)
    return result


@lowers("pow.Tensor_Tensor", "pow.Scalar")
def lower_pow(builder: Builder, x: Operand, y: Operand) -> TensorValue:
    dtype = promote([x, y])
    if not dtype.is_floating_point:
        raise NotLowered("integer power")
    return elementwise(builder, [x, y], lambda a, b: op("pow", a, b), dtype=dtype)


@lowers("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other")
def lower_xlogy(builder: Builder, x: Operand, y: Operand) -> TensorValue:
    dtype = promote_to_float([x, y])

    def compute(a: Expr, b: Expr) -> Expr:
        product = op("mul", a, rounded(builder, op("log", b), dtype))
        product = where(compare("eq", a, literal(0, a)), literal(0, a), product)
        return where(op("isnan", b, dtype=torch.bool), b, product)

    return elementwise(builder, [rounded_number(builder, o, dtype) for o in (x, y)], compute, dtype=dtype)


# -- comparison and logic -------------------------------------------------------------------------------------------


def _comparison(name: str) -> None:
    @lowers(f"{name}.Tensor", f"{name}.Scalar")
    def lower(builder: Builder, x: Operand, y: Operand) -> TensorValue:
        common = promote([x, y])
        inner = compute_dtype(common)
        if isinstance(y, (int, float)) and not isinstance(y, bool) and not common.is_floating_point:
            info = torch.iinfo(common if common != torch.bool else torch.uint8)
            if not info.min <= y <= info.max:
                raise NotLowered("comparison with a number outside the tensor's range")
        operands = [x, held(y, common)]  # eager compares in the tensor's own precision
        return elementwise(builder, operands, lambda a, b: compare(name, a, b), dtype=torch.bool, compute_in=inner)


for _name in sorted(COMPARISONS):
    _comparison(_name)


def _truth(value: Expr) -> Expr:
    return value if value.dtype == torch.bool else compare("ne", value, literal(0, value))


def _logical(name: str) -> None:
    @lowers(f"{name}.default")
    def lower(builder: Builder, *operands: TensorValue) -> TensorValue:
        shape = broadcast_shapes([o.shape for o in operands])
        widened = [broadcast_to(o, shape) for o in operands]

        def element(subscripts: tuple[Index, ...]) -> Expr:
            values = [_truth(builder.load(o, subscripts, compute_dtype(o.dtype))) for o in widened]
            return op(name, *values)

        return builder.pointwise(shape, torch.bool, element)


for _name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
    _logical(_name)


def lower_is_special(name: str, builder: Builder, x: TensorValue) -> TensorValue:
    if not x.dtype.is_floating_point:
        return elementwise(builder, [x], lambda a: Constant(False, torch.bool), dtype=torch.bool, compute_in=x.dtype)
    inner = compute_dtype(x.dtype)
    return elementwise(builder, [x], lambda a: op(name, a, dtype=torch.bool), dtype=torch.bool, compute_in=inner)


for _name in ("isnan", "isinf"):
    lowers(f"{_name}.default")(partial(lower_is_special, _name))


@lowers("signbit.default")
def lower_signbit(builder: Builder, x: TensorValue) -> TensorValue:
    if x.dtype == torch.bool:
        return elementwise(builder, [x], lambda a: Constant(False, torch.bool), dtype=torch.bool)
    inner = compute_dtype(x.dtype)
    return elementwise(builder, [x], lambda a: op("signbit", a, dtype=torch.bool), dtype=torch.bool, compute_in=inner)


# -- selection ------------------------------------------------------------------------------------------------------


@lowers("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def lower_where(builder: Builder, condition: TensorValue, x: Operand, y: Operand) -> TensorValue:
    dtype = promote([x, y])
    operands = [condition, x, y]
    shape = broadcast_shapes([o.shape for o in operands if isinstance(o, TensorValue)])
    c, a, b = (broadcast_to(o, shape) if isinstance(o, TensorValue) else o for o in operands)
    assert isinstance(c, TensorValue)

    def element(subscripts: tuple[Index, ...]) -> Expr:
        yes, no = (
            builder.load(o, subscripts, dtype) if isinstance(o, TensorValue) else number(o, dtype) for o in (a, b)
        )
        return where(_truth(c.at(subscripts)), yes, no)

    return builder.pointwise(shape, dtype, element)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def lower_masked_fill(builder: Builder, x: TensorValue, mask: TensorValue, value: Operand) -> TensorValue:
    shape = broadcast_shapes([x.shape, mask.shape])
    wide, cover = broadcast_to(x, shape), broadcast_to(mask, shape)
    if isinstance(value, TensorValue):
        fill: Callable[[], Expr] = lambda: builder.convert(value.at(()), x.dtype)  # noqa: E731
    else:
        fill = lambda: number(value, x.dtype)  # noqa: E731
    return builder.pointwise(shape, x.dtype, lambda i: where(cover.at(i), fill(), wide.at(i)))


@lowers("clamp.default", "clamp.Tensor")
def lower_clamp(
    builder: Builder, x: TensorValue, min: Operand | None = None, max: Operand | None = None  # noqa: A002
) -> TensorValue:
    return _clamped(builder, x, min, max)


@lowers("clamp_min.default", "clamp_min.Tensor")
def lower_clamp_min(builder: Builder, x: TensorValue, min: Operand) -> TensorValue:  # noqa: A002
    return _clamped(builder, x, min, None)


@lowers("clamp_max.default", "clamp_max.Tensor")
def lower_clamp_max(builder: Builder, x: TensorValue, max: Operand) -> TensorValue:  # noqa: A002
    return _clamped(builder, x, None, max)


def _clamped(builder: Builder, x: TensorValue, low: Operand | None, high: Operand | None) -> TensorValue:
    present = [bound for bound in (low, high) if bound is not None]
    dtype = promote([x, *present])
    if dtype == torch.bool:
        raise NotLowered("clamp of bool")
    present = [held(bound, dtype) for bound in present]

    def compute(value: Expr, *bounds: Expr) -> Expr:
        rest = list(bounds)
        if low is not None:
            value = _at_least(value, rest.pop(0))
        return _at_most(value, rest.pop(0)) if high is not None else value

    return elementwise(builder, [x, *present], compute, dtype=dtype)


def _at_least(value: Expr, bound: Expr) -> Expr:
    """The larger of the two. A number as bound leaves a zero of either sign alone, as eager does."""
    if _is_plain_number(bound):
        return where(compare("lt", value, bound), bound, value)
    return op("maximum", value, bound)


def _at_most(value: Expr, bound: Expr) -> Expr:
    if _is_plain_number(bound):
        return where(compare("gt", value, bound), bound, value)
    return op("minimum", value, bound)


def _is_plain_number(bound: Expr) -> bool:
    return isinstance(bound, Constant) and bound.dtype.is_floating_point and not math.isnan(bound.value)


# -- conversion -----------------------------------------------------------------------------------------------------


@lowers("_to_copy.default")
def lower_to_copy(builder: Builder, x: TensorValue, *, dtype: torch.dtype | None = None, **kwargs: Any) -> TensorValue:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise NotLowered("copy to another device")
    return builder.pointwise(x.shape, dtype or x.dtype, lambda i: ex.cast(x.at(i), dtype or x.dtype))


@lowers("convert_element_type.default")
def lower_convert(builder: Builder, x: TensorValue, dtype: torch.dtype) -> TensorValue:
    return builder.pointwise(x.shape, dtype, lambda i: ex.cast(x.at(i), dtype))


@lowers("copy.default")
def lower_copy(builder: Builder, x: TensorValue, source: TensorValue, non_blocking: bool = False) -> TensorValue:
    wide = broadcast_to(source, x.shape)
    return builder.pointwise(x.shape, x.dtype, lambda i: ex.cast(wide.at(i), x.dtype))


@lowers("clone.default", "lift_fresh_copy.default", "alias_copy.default")
def lower_clone(builder: Builder, x: TensorValue, *, memory_format: torch.memory_format | None = None) -> TensorValue:
    return builder.pointwise(x.shape, x.dtype, x.at)


# -- activations and their gradients ----------------------------------------------------------------------------------


@lowers("relu.default")
def lower_relu(builder: Builder, x: TensorValue) -> TensorValue:
    if x.dtype == torch.bool:
        raise NotLowered("relu of bool")  # an error in eager
    return elementwise(builder, [x], lambda a: _at_least(a, literal(0, a)), dtype=x.dtype)


# threshold_backward is not here: taken apart, it reads a mask, and forward can save that, a byte for each element.


@lowers("leaky_relu.default")
def lower_leaky_relu(builder: Builder, x: TensorValue, negative_slope: float = 0.01) -> TensorValue:
    def compute(a: Expr) -> Expr:
        return where(compare("gt", a, literal(0, a)), a, op("mul", a, literal(negative_slope, a)))

    return elementwise(builder, [x], compute, dtype=x.dtype)


_SQRT_HALF = 0.7071067811865476
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_GELU_CUBIC = 0.044715


@lowers("gelu.default")
def lower_gelu(builder: Builder, x: TensorValue, approximate: str = "none") -> TensorValue:
    def exact(a: Expr) -> Expr:
        erf = op("erf", op("mul", a, literal(_SQRT_HALF, a)))
        return op("mul", op("mul", a, literal(0.5, a)), op("add", erf, literal(1, a)))

    def tanh(a: Expr) -> Expr:
        return op("mul", op("mul", a, literal(0.5, a)), op("add", op("tanh", _gelu_inner(a)), literal(1, a)))

    return elementwise(builder, [x], tanh if approximate == "tanh" else exact, dtype=x.dtype)


def _gelu_inner(a: Expr) -> Expr:
    cubic = op("mul", op("mul", op("mul", a, a), a), literal(_GELU_CUBIC, a))
    return op("mul", op("add", a, cubic), literal(_SQRT_2_OVER_PI, a))


@lowers("gelu_backward.default")
def lower_gelu_backward(builder: Builder, grad: TensorValue, x: TensorValue, approximate: str = "none") -> TensorValue:
    def exact(g: Expr, a: Expr) -> Expr:
        cdf = op("mul", op("add", op("erf", op("mul", a, literal(_SQRT_HALF, a))), literal(1, a)), literal(0.5, a))
        pdf = op("mul", op("exp", op("mul", op("mul", a, a), literal(-0.5, a))), literal(_INV_SQRT_2PI, a))
        return op("mul", g, op("add", cdf, op("mul", a, pdf)))

    def tanh(g: Expr, a: Expr) -> Expr:
        t = op("tanh", _gelu_inner(a))
        left = op("mul", op("add", t, literal(1, a)), literal(0.5, a))
        slope = op(
            "mul",
            op("add", op("mul", op("mul", a, a), literal(3 * _GELU_CUBIC, a)), literal(1, a)),
            literal(_SQRT_2_OVER_PI, a),
        )
        right = op("mul", op("mul", op("sub", literal(1, a), op("mul", t, t)), slope), op("mul", a, literal(0.5, a)))
        return op("mul", g, op("add", left, right))

    return elementwise(builder, [grad, x], tanh if approximate == "tanh" else exact, dtype=x.dtype)


@lowers("silu.default")
def lower_silu(builder: Builder, x: TensorValue) -> TensorValue:
    def compute(a: Expr) -> Expr:
        if builder.exact_half and x.dtype in HALF:  # eager's way, which rounds to another half now and then
            return op("div", a, op("add", op("exp", op("neg", a)), literal(1, a)))
        return op("mul", a, op("sigmoid", a))

    return elementwise(builder, [x], compute, dtype=x.dtype)


@lowers("silu_backward.default")
def lower_silu_backward(builder: Builder, grad: TensorValue, x: TensorValue) -> TensorValue:
    def compute(g: Expr, a: Expr) -> Expr:
        s = op("sigmoid", a)
        inner = op("add", op("mul", a, op("sub", literal(1, a), s)), literal(1, a))
        return op("mul", op("mul", g, s), inner)

    return elementwise(builder, [grad, x], compute, dtype=x.dtype)


@lowers("sigmoid_backward.default")
def lower_sigmoid_backward(builder: Builder, grad: TensorValue, y: TensorValue) -> TensorValue:
    def compute(g: Expr, s: Expr) -> Expr:
        return op("mul", op("mul", g, op("sub", literal(1, s), s)), s)

    return elementwise(builder, [grad, y], compute, dtype=promote([grad, y]))


@lowers("tanh_backward.default")
def lower_tanh_backward(builder: Builder, grad: TensorValue, y: TensorValue) -> TensorValue:
    def compute(g: Expr, t: Expr) -> Expr:
        return op("mul", g, op("sub", literal(1, t), op("mul", t, t)))

    return elementwise(builder, [grad, y], compute, dtype=promote([grad, y]))


def lower_addc(
    name: str, builder: Builder, x: TensorValue, a: TensorValue, b: TensorValue, *, value: float = 1
) -> TensorValue:
    dtype = promote([x, a, b])
    if not dtype.is_floating_point:
        raise NotLowered("integer addcmul")

    def compute(u: Expr, v: Expr, w: Expr) -> Expr:
        scaled = v if value == 1 else op("mul", v, literal(value, v))
        return op("add", u, op(name, scaled, w))

    return elementwise(builder, [x, a, b], compute, dtype=dtype)


for _name in ("mul", "div"):
    lowers(f"addc{_name}.default")(partial(lower_addc, _name))


@lowers("lerp.Scalar", "lerp.Tensor")
def lower_lerp(builder: Builder, start: TensorValue, end: TensorValue, weight: Operand) -> TensorValue:
    def compute(s: Expr, e: Expr, w: Expr) -> Expr:
        # Which end the interpolation starts from depends on the weight, so that both ends are hit exactly.
        distance = op("sub", e, s)
        near = op("add", s, op("mul", w, distance))
        far = op("sub", e, op("mul", distance, op("sub", literal(1, w), w)))
        return where(compare("lt", op("abs", w), literal(0.5, w)), near, far)

    return elementwise(builder, [start, end, weight], compute, dtype=promote([start, end]))


@lowers("native_dropout_backward.default")
def lower_dropout_backward(builder: Builder, grad: TensorValue, mask: TensorValue, scale: float) -> TensorValue:
    def compute(g: Expr, m: Expr) -> Expr:
        return op("mul", op("mul", g, m), literal(scale, g))

    return elementwise(builder, [grad, mask], compute, dtype=promote([grad, mask, float(scale)]))
