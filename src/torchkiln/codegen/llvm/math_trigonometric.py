"""Float32 trigonometric functions and their inverses as polynomials in vector instructions.

Conventions and accuracy are those of :mod:`torchkiln.codegen.llvm.math_exponential`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.math_exponential import rounded

# sin(r) = r + r**3 P(r**2), cos(r) = 1 - r**2 / 2 + r**4 P(r**2), tan(r) = r + r**3 P(r**2), for |r| <= pi / 4 and 1 %
# more, since the quadrant is found in float32; errors 2**-27, 2**-32, 2**-29.
_SIN = (-0.000195051456, 0.00833209325, -0.166666538)
_COS = (2.44120856e-05, -0.00138871302, 0.0416666418)
_TAN = (0.00448146276, -0.000118591568, 0.0109954318, 0.0212226417, 0.0540709756, 0.133325711, 0.333333522)
# atan(x) = x + x**3 P(x**2) for |x| <= 1; the error is 2**-25.8.
_ATAN = (
    *(0.00291973399, -0.0163641628, 0.0432058834, -0.0755172446, 0.106657855, -0.142110035),
    *(0.199937671, -0.333331525),
)
# asin(x) = x + x**3 P(x**2) for |x| <= 0.56; the error is 2**-29.
_ASIN = (0.0470630042, 0.00709492061, 0.0339026339, 0.0442469455, 0.075020127, 0.166666329)
# pi / 2 in three float32 parts.
_HALF_PI = (1.57079637, -4.37113883e-8, -1.71512451e-15)

# 32 zeros, then 224 bits of 2 / pi behind the point: as far as float32 reaches, and 96 bits more.
_TWO_OVER_PI = (
    *(0, 0xA2F9836E, 0x4E441529, 0xFC2757D1, 0xF534DDC0, 0xDB629599, 0x3C439041, 0xFE5163AB),
)

REDUCTION_LIMIT = 1e5
"""Largest argument of sin, cos and tan for which three parts of pi are enough."""


def near_quadrant(b: MathBody, a: str) -> tuple[str, str, str]:
    """The quadrant of magnitudes up to ``REDUCTION_LIMIT``."""
    n, bits = rounded(b, a, 2 / math.pi, 0)
    whole = b.fma(n, -_HALF_PI[0], a)
    second = b.mul(n, _HALF_PI[1])
    r = b.sub(whole, second)
    rest = b.sub(b.sub(b.sub(whole, r), second), b.fma(n, _HALF_PI[1], b.neg(second)))
    return r, b.fma(n, -_HALF_PI[2], rest), bits


def _sine_of(b: MathBody, r: str, rest: str, s: str) -> str:
    return b.add(b.fma(b.mul(b.horner(s, _SIN), s), r, rest), r)


def _cosine_of(b: MathBody, r: str, rest: str, s: str) -> str:
    return b.fma(b.fma(b.horner(s, _COS), s, -0.5), s, b.fma(rest, b.neg(r), 1.0))


def _with_sign_of_bits(b: MathBody, value: str, sign: str) -> str:
    """``value`` negated where the top bit of ``sign`` is set."""
    return b.from_bits(b.integer("xor", b.bits(value), b.integer("and", sign, -(1 << 31))))


Quadrant = Callable[[MathBody, str], tuple[str, str, str]]
"""``(r, rest of its rounding, n)`` of a magnitude ``n pi/2 + r + rest``, with n in the low bits of an integer."""


def far_quadrant(b: MathBody, a: str) -> tuple[str, str, str]:
    """The quadrant of any magnitude above 2**-30, of one lane, in integers; NaN of infinity and NaN."""
    bits = b.bits(a)
    mantissa = b.integer("or", b.integer("and", bits, 0x7FFFFF), 0x800000)
    # The magnitude is mantissa * 2**(exponent - 150). Of its product with 2 / pi only what is below 4 matters, so the
    # bits of 2 / pi are read from where that begins; the table has 32 zeros before them.
    start = b.integer("sub", b.integer("lshr", bits, 23), 150 + 2 - 32)
    table = b.module.words(_TWO_OVER_PI)
    first = b.fresh(f"zext i32 {b.integer('lshr', start, 5)} to i64")
    words = []
    for k in range(4):
        at = b.fresh(f"getelementptr i32, ptr {table}, i64 {b.fresh(f'add i64 {first}, {k}')}")
        words.append(b.fresh(f"load i32, ptr {at}"))
    b.module.declare("declare i32 @llvm.fshl.i32(i32, i32, i32)")
    shift = b.integer("and", start, 31)
    wide = b.fresh(f"zext i32 {mantissa} to i64")
    carried, parts = "0", []
    for high, low in list(pairwise(words))[::-1]:
        part = b.fresh(f"call i32 @llvm.fshl.i32(i32 {high}, i32 {low}, i32 {shift})")
        product = b.fresh(f"mul i64 {wide}, {b.fresh(f'zext i32 {part} to i64')}")
        parts.append(b.fresh(f"add i64 {product}, {carried}"))
        carried = b.fresh(f"lshr i64 {parts[-1]}, 32")
    # Quarters of a turn with 62 bits behind the point.
    below = b.fresh(f"and i64 {parts[1]}, {0xFFFFFFFF}")
    turn = b.fresh(f"or i64 {b.fresh(f'shl i64 {parts[2]}, 32')}, {below}")
    signed = b.fresh(f"shl i64 {turn}, 2")
    n = b.fresh(f"add i64 {b.fresh(f'lshr i64 {turn}, 62')}, {b.fresh(f'lshr i64 {signed}, 63')}")
    d = b.on(VectorType("double", 1))
    angle = d.mul(b.fresh(f"sitofp i64 {signed} to double"), math.pi / 2 * 2.0**-64)
    r = b.fresh(f"fptrunc double {angle} to float")
    rest = b.fresh(f"fptrunc double {d.sub(angle, b.fresh(f'fpext float {r} to double'))} to float")
    return b.add(r, b.mul(a, 0.0)), rest, b.fresh(f"trunc i64 {n} to i32")


def _is_odd(b: MathBody, n: str) -> str:
    return b.int_compare("ne", b.integer("and", n, 1), 0)


def sin(b: MathBody, x: str, quadrant: Quadrant = near_quadrant) -> str:
    # On the magnitude, with the sign put back at the end: the polynomial would lose the sign of -0.
    r, rest, n = quadrant(b, b.fabs(x))
    s = b.mul(r, r)
    value = b.select(_is_odd(b, n), _cosine_of(b, r, rest, s), _sine_of(b, r, rest, s))
    return _with_sign_of_bits(b, value, b.integer("xor", b.integer("shl", n, 30), b.bits(x)))


def cos(b: MathBody, x: str, quadrant: Quadrant = near_quadrant) -> str:
    r, rest, n = quadrant(b, b.fabs(x))
    s = b.mul(r, r)
    value = b.select(_is_odd(b, n), _sine_of(b, r, rest, s), _cosine_of(b, r, rest, s))
    return _with_sign_of_bits(b, value, b.integer("shl", b.integer("add", n, 1), 30))


def tan(b: MathBody, x: str, quadrant: Quadrant = near_quadrant) -> str:
    r, rest, n = quadrant(b, b.fabs(x))
    s = b.mul(r, r)
    rest = b.fma(rest, s, rest)  # the slope reaches 2
    beyond = b.fma(b.mul(b.horner(s, _TAN), s), r, rest)
    value = b.add(beyond, r)
    lost = b.sub(beyond, b.sub(value, r))
    inverse = b.div(-1.0, value)
    # One step of Newton's iteration, for the part of the value that rounding took too.
    error = b.fma(inverse, lost, b.fma(inverse, value, 1.0))
    value = b.select(_is_odd(b, n), b.fma(inverse, error, inverse), value)
    return _with_sign_of_bits(b, value, b.bits(x))


def atan(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    steep = b.compare("ogt", a, 1.0)
    r = b.odd(b.select(steep, b.div(-1.0, a), a), _ATAN)
    return b.copysign(b.select(steep, b.add(b.add(r, _HALF_PI[1]), _HALF_PI[0]), r), x)


def atan2(b: MathBody, y: str, x: str) -> str:
    ay, ax = b.fabs(y), b.fabs(x)
    steep = b.compare("ogt", ay, ax)
    ratio = b.div(b.select(steep, b.neg(ax), ay), b.select(steep, ay, ax))
    # Two infinities make 1, two zeros 0.
    ratio = b.select(b.compare("oeq", ax, ay), 1.0, ratio)
    ratio = b.select(b.compare("oeq", ay, 0.0), 0.0, ratio)
    r = b.odd(ratio, _ATAN)
    backward = b.int_compare("slt", b.bits(x), 0)  # by the sign bit: -0 points backward
    r = b.select(backward, b.neg(r), r)
    quarters = b.select(steep, 1.0, b.select(backward, 2.0, 0.0))
    angle = b.fma(quarters, _HALF_PI[0], b.fma(quarters, _HALF_PI[1], r))
    angle = b.copysign(angle, y)
    return b.select(b.compare("uno", x, y), math.nan, angle)


def _asin_parts(b: MathBody, x: str) -> tuple[str, str]:
    """``(steep, r)``: asin|x| is r, or pi/2 - 2 r where ``steep``.

    That is beyond 0.55, where r stays below 1/2 and so has half the rounding error it would have above.
    """
    a = b.fabs(x)
    steep = b.compare("ogt", a, 0.55)
    half = b.fma(a, -0.5, 0.5)
    z = b.select(steep, b.intrinsic("sqrt", half), a)
    s = b.select(steep, half, b.mul(a, a))
    return steep, b.fma(b.mul(b.horner(s, _ASIN), s), z, z)


def asin(b: MathBody, x: str) -> str:
    steep, r = _asin_parts(b, x)
    far = b.add(b.fma(r, -2.0, _HALF_PI[1]), _HALF_PI[0])
    return b.copysign(b.select(steep, far, r), x)


def acos(b: MathBody, x: str) -> str:
    steep, r = _asin_parts(b, x)
    near = b.add(b.sub(_HALF_PI[1], b.copysign(r, x)), _HALF_PI[0])
    twice = b.add(r, r)
    backward = b.add(b.sub(2 * _HALF_PI[1], twice), 2 * _HALF_PI[0])
    far = b.select(b.compare("olt", x, 0.0), backward, twice)
    return b.select(steep, far, near)
