"""Scalar operations of loop IR as LLVM instructions, on scalars or vectors alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchkiln.codegen.llvm.instructions import (
    InstructionList,
    Register,
    double_literal,
    join_lanes,
    splat_literal,
    suffix,
    take_lanes,
    vector_type,
)
from torchkiln.codegen.llvm.math import math_function
from torchkiln.ir import ops

_REGISTER = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "i16",  # as bits: LLVM turns bfloat rounding into a library call
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "i8",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Value:
    """An LLVM value: a scalar (``lanes == 1``) or a vector."""

    ref: str
    dtype: torch.dtype
    lanes: int

    @property
    def type(self) -> str:
        return vector_type(register_type(self.dtype), self.lanes)

    @property
    def operand(self) -> str:
        return f"{self.type} {self.ref}"

    @property
    def is_constant(self) -> bool:
        """Whether it stands in the text of the code; what an instruction made has a name that begins with %."""
        return not self.ref.startswith("%")


def register_type(dtype: torch.dtype) -> str:
    return _REGISTER[dtype]


def memory_type(dtype: torch.dtype) -> str:
    return "i8" if dtype == torch.bool else _REGISTER[dtype]


def literal(value: bool | int | float, dtype: torch.dtype) -> str:
    """The text of one constant element."""
    if dtype == torch.bool:
        return "true" if value else "false"
    if dtype == torch.bfloat16:
        return str(_scalar(value, torch.bfloat16).view(torch.int16).item())
    if dtype == torch.float16:
        half = int(_scalar(value, torch.float16).view(torch.int16).item()) & 0xFFFF
        return f"0xH{half:04X}"
    if dtype.is_floating_point:
        return double_literal(float(_scalar(value, dtype).item()))
    return str(int(value))


def _scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Here, wherever the user has new tensors made."""
    return torch.tensor(float(value), dtype=dtype, device="cpu")


class Instructions(InstructionList):
    """Instructions on values that know their dtype."""

    def constant(self, value: bool | int | float, dtype: torch.dtype, lanes: int = 1) -> Value:
        return Value(splat_literal(register_type(dtype), literal(value, dtype), lanes), dtype, lanes)

    def make(self, instruction: str, dtype: torch.dtype, lanes: int) -> Value:
        return Value(self.fresh(instruction), dtype, lanes)

    def binary(self, name: str, left: Value, right: Value) -> Value:
        """An instruction on two values of one type whose result has that type."""
        return self.make(f"{name} {left.operand}, {right.ref}", left.dtype, left.lanes)

    def register(self, value: Value) -> Register:
        return Register(self, value.type, value.ref)

    def widen(self, value: Value, lanes: int) -> Value:
        """A scalar repeated in every lane; a vector of that width stays."""
        if value.lanes == lanes:
            return value
        assert value.lanes == 1, "a vector cannot change its width"
        element = register_type(value.dtype)
        if value.is_constant:
            return Value(splat_literal(element, value.ref, lanes), value.dtype, lanes)
        wide = vector_type(element, lanes)
        first = self.fresh(f"insertelement {wide} poison, {element} {value.ref}, i64 0")
        return self.make(
            f"shufflevector {wide} {first}, {wide} poison, <{lanes} x i32> zeroinitializer", value.dtype, lanes
        )

    def intrinsic(self, name: str, args: list[Value], dtype: torch.dtype, flags: str = "") -> Value:
        """Call intrinsic ``llvm.<name>``, overloaded on the type of its first operand."""
        first = args[0]
        symbol = f"@llvm.{name}.{suffix(register_type(first.dtype), first.lanes)}"
        result = vector_type(register_type(dtype), first.lanes)
        self.module.declare(f"declare {result} {symbol}({', '.join(a.type for a in args)})")
        return self.make(f"call {flags}{result} {symbol}({', '.join(a.operand for a in args)})", dtype, first.lanes)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        lanes = max(condition.lanes, yes.lanes, no.lanes)
        c = condition if condition.lanes == 1 else self.widen(condition, lanes)
        y, n = self.widen(yes, lanes), self.widen(no, lanes)
        return self.make(f"select {c.operand}, {y.operand}, {n.operand}", yes.dtype, lanes)


def is_signed(dtype: torch.dtype) -> bool:
    return dtype not in (torch.uint8, torch.bool)


def convert(f: Instructions, value: Value, dtype: torch.dtype) -> Value:
    """Convert as eager does: floats truncate toward zero, integers wrap, anything non-zero is True."""
    source = value.dtype
    if source == dtype:
        return value
    if source == torch.bfloat16:
        return convert(f, _bfloat_to_float(f, value), dtype)
    if dtype == torch.bfloat16:
        return _float_to_bfloat(f, convert(f, value, torch.float32))
    lanes = value.lanes
    target = vector_type(register_type(dtype), lanes)
    if dtype == torch.bool:
        zero = f.constant(0, source, lanes)
        if source.is_floating_point:
            return f.make(f"fcmp une {value.operand}, {zero.ref}", dtype, lanes)
        return f.make(f"icmp ne {value.operand}, {zero.ref}", dtype, lanes)
    if source.is_floating_point:
        if dtype.is_floating_point:
            return _float_to_float(f, value, dtype)
        return _float_to_integer(f, value, dtype)
    if dtype.is_floating_point:
        if dtype == torch.float16 and source != torch.bool:
            # By way of float32, as eager: one rounding more for large integers, the same one.
            return convert(f, convert(f, value, torch.float32), dtype)
        name = "sitofp" if is_signed(source) else "uitofp"
        return f.make(f"{name} {value.operand} to {target}", dtype, lanes)
    if source.itemsize == dtype.itemsize and source != torch.bool:
        return Value(value.ref, dtype, lanes)
    if source != torch.bool and source.itemsize > dtype.itemsize:
        return f.make(f"trunc {value.operand} to {target}", dtype, lanes)
    name = "sext" if is_signed(source) else "zext"
    return f.make(f"{name} {value.operand} to {target}", dtype, lanes)


def _float_to_float(f: Instructions, value: Value, dtype: torch.dtype) -> Value:
    target = vector_type(register_type(dtype), value.lanes)
    if dtype.itemsize > value.dtype.itemsize:
        return f.make(f"fpext {value.operand} to {target}", dtype, value.lanes)
    if value.dtype == torch.float64 and dtype == torch.float16:
        return convert(f, convert(f, value, torch.float32), dtype)
    if dtype == torch.float16:
        # Without the fence, LLVM narrows a product that is rounded here and then contracts it, unrounded, into a sum.
        value = f.intrinsic("arithmetic.fence", [value], value.dtype)
    return f.make(f"fptrunc {value.operand} to {target}", dtype, value.lanes)


def _float_to_integer(f: Instructions, value: Value, dtype: torch.dtype) -> Value:
    """Truncate. Out of range, eager goes through a signed integer of 64 or 32 bits and then wraps."""
    if value.dtype == torch.float16:
        value = convert(f, value, torch.float32)
    wide = torch.int64 if dtype in (torch.int64, torch.uint8) else torch.int32
    element = register_type(wide)
    target = vector_type(element, value.lanes)
    # fptosi is poison out of range; freezing makes it the machine's answer instead of undefined behaviour.
    raw = f.fresh(f"fptosi {value.operand} to {target}")
    frozen = f.make(f"freeze {target} {raw}", wide, value.lanes)
    return convert(f, frozen, dtype)


def _bfloat_to_float(f: Instructions, value: Value) -> Value:
    bits = f.register(value).convert("zext", vector_type("i32", value.lanes)) << 16
    return Value(bits.convert("bitcast", vector_type("float", value.lanes)).name, torch.float32, value.lanes)


def _float_to_bfloat(f: Instructions, value: Value) -> Value:
    """Round to nearest even; NaN becomes the quiet NaN eager makes.

    By integers: the instruction of processors with AVX512_BF16 makes zeros of denormals, which eager keeps. To look for
    them first gains 6 % of a gelu.
    """
    lanes = value.lanes
    if f.module.target.is_gpu:
        return _rounded_by_instruction(f, value)
    words = vector_type("i32", lanes)
    bits = f.register(value).convert("bitcast", words)
    odd = (bits & 0x10000).ne(0)
    high = bits + odd.select(f.literal(words, 0x8000), 0x7FFF)
    nan = f.make(f"fcmp uno {value.operand}, {f.constant(0.0, torch.float32, lanes).ref}", torch.bool, lanes)
    chosen = f.register(nan).select(f.literal(words, 0x7FC00000), high)
    if lanes % _HALVES == 0 and f.module.target.vector_bits == f.module.target.processor.vector_bits == 512:
        return Value(_upper_halves(f, chosen.name, lanes), torch.bfloat16, lanes)
    return Value((chosen >> 16).convert("trunc", vector_type("i16", lanes)).name, torch.bfloat16, lanes)


_HALVES = 32  # elements of 16 bits in a register of AVX-512


def _upper_halves(f: Instructions, words: str, lanes: int) -> str:
    """The upper halves of 32-bit lanes, by one instruction for two registers.

    Shifted and truncated they take four, and ``x / 2 * (x + 1)`` 1.33 times the time; a shuffle in place of the
    intrinsic compiles 1.5 ms longer.
    """
    vector, symbol = f"<{_HALVES} x i16>", "@llvm.x86.avx512.vpermi2var.hi.512"
    f.module.declare(f"declare {vector} {symbol}({vector}, {vector}, {vector})")
    order = f"<{', '.join(f'i16 {place}' for place in range(1, 2 * _HALVES, 2))}>"
    half = _HALVES // 2
    pieces = [take_lanes(f, "i32", lanes, words, range(start, start + half)) for start in range(0, lanes, half)]
    registers = [f"{vector} {f.fresh(f'bitcast <{half} x i32> {piece} to {vector}')}" for piece in pieces]
    pairs = zip(registers[::2], registers[1::2], strict=True)
    joined = [f.fresh(f"call {vector} {symbol}({low}, {vector} {order}, {high})") for low, high in pairs]
    return join_lanes(f, "i16", _HALVES, joined)


def _rounded_by_instruction(f: Instructions, value: Value) -> Value:
    """By the instruction that cards have, in a function of its own: half a dozen of integers for each value are more
    than memory waits for."""
    lanes = value.lanes
    symbol = f"{ROUND_TO_BFLOAT}{lanes}"
    bits, rounded = vector_type("i16", lanes), vector_type("bfloat", lanes)
    f.module.define(
        symbol,
        f"define internal {bits} @{symbol}({value.type} %x) #1 {{\n"
        f"  %rounded = fptrunc {value.type} %x to {rounded}\n"
        f"  %bits = bitcast {rounded} %rounded to {bits}\n  ret {bits} %bits\n}}\n",
    )
    return f.make(f"call {bits} @{symbol}({value.operand})", torch.bfloat16, lanes)


# -- operations -----------------------------------------------------------------------------------------------------

ROUND_TO_BFLOAT = "kiln_round_to_bfloat_v"
_FLOAT_COMPARE = {name: f"o{name}" for name in ops.COMPARISONS} | {"ne": "une"}  # NaN is unequal to anything
_FLOAT_BINARY = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_FLOAT_INTRINSICS = {
    **{name: name for name in ("floor", "ceil", "trunc", "sqrt", "maximum", "minimum", "copysign", "fma")},
    "round": "roundeven",
    "abs": "fabs",
    "fmax": "maxnum",
    "fmin": "minnum",
}
_INTEGER_BINARY = {
    **{name: name for name in ("add", "sub", "mul")},
    **{f"{kind}_{name}": name for kind in ("bitwise", "logical") for name in ("and", "or", "xor")},
}
_LITERAL = re.compile(r"(?:splat \(i\d+ )?(-?\d+)\)?")


def apply(f: Instructions, name: str, args: list[Value], dtype: torch.dtype) -> Value:
    """Emit operation ``name``. Operands are all scalars or are widened to the widest."""
    if name in ("cast", "narrow"):
        return convert(f, args[0], dtype)
    if name == "rounded":
        return f.intrinsic("arithmetic.fence", args, dtype)
    if name == "where":
        return f.select(args[0], args[1], args[2])
    lanes = max(a.lanes for a in args)
    args = [f.widen(a, lanes) for a in args]
    if name in ops.COMPARISONS:
        return compare(f, name, *args)
    operation = _float_operation if args[0].dtype.is_floating_point else _integer_operation
    return operation(f, name, args, dtype)


def compare(f: Instructions, name: str, left: Value, right: Value) -> Value:
    if left.dtype.is_floating_point:
        return f.make(f"fcmp {_FLOAT_COMPARE[name]} {left.operand}, {right.ref}", torch.bool, left.lanes)
    predicate = integer_predicate(name, left.dtype)
    return f.make(f"icmp {predicate} {left.operand}, {right.ref}", torch.bool, left.lanes)


def integer_predicate(name: str, dtype: torch.dtype) -> str:
    """The predicate of ``icmp`` for a comparison of the IR."""
    return name if name in ("eq", "ne") else f"s{name}" if is_signed(dtype) else f"u{name}"


def _float_operation(f: Instructions, name: str, args: list[Value], dtype: torch.dtype) -> Value:
    if name in _FLOAT_BINARY:
        # "contract" lets a multiply and an add become one fused instruction: at least as accurate as two.
        return f.binary(f"{_FLOAT_BINARY[name]} contract", *args)
    if name in _FLOAT_INTRINSICS:
        return f.intrinsic(_FLOAT_INTRINSICS[name], args, dtype)
    if name in _FLOAT_FUNCTIONS:
        return _FLOAT_FUNCTIONS[name](f, *args)
    if name in ops.MATH or name == "fmod":
        return _library(f, name, *args)
    raise NotImplementedError(f"float operation {name}")


def _library(f: Instructions, name: str, *args: Value) -> Value:
    first = args[0]
    symbol = math_function(f.module, name, register_type(first.dtype), first.lanes)
    return f.make(f"call {first.type} {symbol}({', '.join(a.operand for a in args)})", first.dtype, first.lanes)


def _neg(f: Instructions, x: Value) -> Value:
    return f.make(f"fneg {x.operand}", x.dtype, x.lanes)


def _reciprocal(f: Instructions, x: Value) -> Value:
    return f.binary("fdiv", f.constant(1.0, x.dtype, x.lanes), x)


def _rsqrt(f: Instructions, x: Value) -> Value:
    return _reciprocal(f, f.intrinsic("sqrt", [x], x.dtype))


def _float_sign(f: Instructions, x: Value) -> Value:
    minus_one, zero, one = (f.constant(number, x.dtype, x.lanes) for number in (-1.0, 0.0, 1.0))
    positive, negative = compare(f, "gt", x, zero), compare(f, "lt", x, zero)
    return f.select(positive, one, f.select(negative, minus_one, zero))


def _isnan(f: Instructions, x: Value) -> Value:
    return f.make(f"fcmp uno {x.operand}, {x.ref}", torch.bool, x.lanes)


def _isinf(f: Instructions, x: Value) -> Value:
    return compare(f, "eq", f.intrinsic("fabs", [x], x.dtype), f.constant(math.inf, x.dtype, x.lanes))


def _signbit(f: Instructions, x: Value) -> Value:
    integer = torch.int64 if x.dtype == torch.float64 else torch.int32
    bits = f.make(f"bitcast {x.operand} to {vector_type(register_type(integer), x.lanes)}", integer, x.lanes)
    return compare(f, "lt", bits, f.constant(0, integer, x.lanes))


def _first_maximum(f: Instructions, x: Value, later: Value) -> Value:
    return f.select(_isnan(f, later), later, f.select(compare(f, "gt", later, x), later, x))


def _float_remainder(f: Instructions, left: Value, right: Value) -> Value:
    """Remainder with the sign of the divisor."""
    rest = _library(f, "fmod", left, right)
    zero = f.constant(0.0, left.dtype, left.lanes)
    nonzero = compare(f, "ne", rest, zero)
    opposite = f.binary("xor", compare(f, "lt", rest, zero), compare(f, "lt", right, zero))
    adjust = f.binary("and", nonzero, opposite)
    return f.select(adjust, f.binary("fadd", rest, right), rest)


def _float_floor_divide(f: Instructions, left: Value, right: Value) -> Value:
    """Floor of the quotient as eager defines it: from the exact remainder, not from the rounded quotient."""
    dtype, lanes = left.dtype, left.lanes
    zero, half, one, infinity = (f.constant(number, dtype, lanes) for number in (0.0, 0.5, 1.0, math.inf))
    rest = _library(f, "fmod", left, right)
    quotient = f.binary("fdiv", f.binary("fsub", left, rest), right)
    opposite = f.binary("xor", compare(f, "lt", right, zero), compare(f, "lt", rest, zero))
    adjust = f.binary("and", opposite, compare(f, "ne", rest, zero))
    quotient = f.select(adjust, f.binary("fsub", quotient, one), quotient)
    floored = f.intrinsic("floor", [quotient], dtype)
    above = compare(f, "gt", f.binary("fsub", quotient, floored), half)
    result = f.select(above, f.binary("fadd", floored, one), floored)
    plain = f.binary("fdiv", left, right)
    result = f.select(compare(f, "ne", quotient, zero), result, f.intrinsic("copysign", [zero, plain], dtype))
    # A quotient beyond the largest number is its own floor; its remainder is not to be had from the library.
    beyond = compare(f, "eq", f.intrinsic("fabs", [plain], dtype), infinity)
    finite = compare(f, "lt", f.intrinsic("fabs", [left], dtype), infinity)
    known = f.binary("or", f.binary("and", beyond, finite), compare(f, "eq", right, zero))
    return f.select(known, plain, result)


_FLOAT_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "neg": _neg,
    "reciprocal": _reciprocal,
    "rsqrt": _rsqrt,
    "sign": _float_sign,
    "isnan": _isnan,
    "isinf": _isinf,
    "signbit": _signbit,
    "first_maximum": _first_maximum,
    "remainder": _float_remainder,
    "floor_divide": _float_floor_divide,
}


def _integer_operation(f: Instructions, name: str, args: list[Value], dtype: torch.dtype) -> Value:
    first, lanes = args[0], args[0].lanes
    signed = is_signed(first.dtype)
    if name in _INTEGER_BINARY:
        return f.binary(_INTEGER_BINARY[name], *args)
    if name in ("bitwise_not", "logical_not"):
        ones = splat_literal(register_type(first.dtype), "true" if first.dtype == torch.bool else "-1", lanes)
        return f.make(f"xor {first.operand}, {ones}", dtype, lanes)
    zero = f.constant(0, first.dtype, lanes)
    if name == "neg":
        return f.binary("sub", zero, first)
    if name == "abs":
        if not signed:
            return first
        negated = f.binary("sub", zero, first)
        return f.select(compare(f, "lt", first, zero), negated, first)
    if name == "sign":
        one = f.constant(1, dtype, lanes)
        positive = f.select(compare(f, "gt", first, zero), one, zero)
        return f.select(compare(f, "lt", first, zero), f.constant(-1, dtype, lanes), positive) if signed else positive
    if name in ("maximum", "minimum", "fmax", "fmin", "first_maximum"):
        return f.intrinsic(f"{'s' if signed else 'u'}{'max' if 'max' in name else 'min'}", args, dtype)
    if name == "signbit":
        return compare(f, "lt", first, zero) if signed else f.constant(False, torch.bool, lanes)
    if name in ("trunc_divide", "fmod", "floor_divide", "remainder"):
        return _integer_division(f, name, *args)
    raise NotImplementedError(f"integer operation {name}")


def _integer_division(f: Instructions, name: str, left: Value, right: Value) -> Value:
    """Division by any number. The machine traps at zero, for which the result is any, and at the least number by -1,
    which wraps: both divide by 1 instead.
    """
    dtype, lanes = left.dtype, left.lanes
    if _known_number(right) not in (None, 0, -1):
        return divide_integers(f, name, left, right)
    # Lanes that a masked load left undefined must not divide by it.
    right = f.make(f"freeze {right.operand}", dtype, lanes)
    zero, one = f.constant(0, dtype, lanes), f.constant(1, dtype, lanes)
    if not is_signed(dtype):
        safe = f.select(compare(f, "eq", right, zero), one, right)
        return divide_integers(f, name, left, safe)
    next_, two = f.binary("add", right, one), f.constant(2, dtype, lanes)
    unsafe = f.make(f"icmp ult {next_.operand}, {two.ref}", torch.bool, lanes)
    result = divide_integers(f, name, left, f.select(unsafe, one, right))
    if name in ("fmod", "remainder"):  # by 1 and by -1 nothing is left
        return result
    negated = f.binary("sub", zero, left)
    return f.select(compare(f, "eq", right, f.constant(-1, dtype, lanes)), negated, result)


def divide_integers(f: Instructions, name: str, left: Value, right: Value) -> Value:
    """Division by what is neither 0 nor -1."""
    dtype, lanes = left.dtype, left.lanes
    quotient, rest = _quotient_and_rest(f, left, right)
    if name in ("trunc_divide", "fmod"):
        return quotient() if name == "trunc_divide" else rest()
    if not is_signed(dtype):
        return quotient() if name == "floor_divide" else rest()
    zero, left_over = f.constant(0, dtype, lanes), rest()
    opposite = f.binary("xor", compare(f, "lt", left_over, zero), compare(f, "lt", right, zero))
    adjust = f.binary("and", opposite, compare(f, "ne", left_over, zero))
    if name == "remainder":
        return f.select(adjust, f.binary("add", left_over, right), left_over)
    towards_zero = quotient()
    return f.select(adjust, f.binary("sub", towards_zero, f.constant(1, dtype, lanes)), towards_zero)


def _quotient_and_rest(f: Instructions, left: Value, right: Value) -> tuple[Callable[[], Value], Callable[[], Value]]:
    """The quotient towards zero, and the remainder.

    No vector instruction divides integers. Up to 32 bits the truncated quotient of doubles is exact: 262,144 of int32
    take 112 µs (eager 432), of int64, one after the other, 592 (eager 515).
    """
    dtype, lanes = left.dtype, left.lanes
    sign = "s" if is_signed(dtype) else "u"
    if lanes == 1 or dtype == torch.int64 or _known_number(right) is not None:
        return lambda: f.binary(f"{sign}div", left, right), lambda: f.binary(f"{sign}rem", left, right)
    double = vector_type("double", lanes)
    a, b = (f.fresh(f"{sign}itofp {value.operand} to {double}") for value in (left, right))
    ratio = f.fresh(f"fdiv {double} {a}, {b}")
    quotient = f.make(f"fpto{sign}i {double} {ratio} to {left.type}", dtype, lanes)
    return lambda: quotient, lambda: f.binary("sub", left, f.binary("mul", quotient, right))


def _known_number(value: Value) -> int | None:
    """The number that a constant holds in every lane."""
    found = _LITERAL.fullmatch(value.ref)
    return None if found is None else int(found.group(1))
