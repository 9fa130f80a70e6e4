"""Float32 trigonometric functions and their inverses as polynomials in vector instructions.

Conventions and accuracy are those of :mod:`torchkiln.codegen.llvm.math_exponential`.
"""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody
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

REDUCTION_LIMIT = 1e5
"""Largest argument of sin, cos and tan for which three parts of pi are enough."""


def _quadrant(b: MathBody, a: str) -> tuple[str, str, str, str]:
    """``(r, rest of its rounding, bits, odd)``: a = n pi/2 + r + rest, n in the low ``bits``, and whether n is odd."""
    n, bits = rounded(b, a, 2 / math.pi, 0)
    whole = b.fma(n, -_HALF_PI[0], a)
    second = b.mul(n, _HALF_PI[1])
    r = b.sub(whole, second)
    rest = b.sub(b.sub(b.sub(whole, r), second), b.fma(n, _HALF_PI[1], b.neg(second)))
    return r, b.fma(n, -_HALF_PI[2], rest), bits, b.int_compare("ne", b.integer("and", bits, 1), 0)


def _sine_of(b: MathBody, r: str, rest: str, s: str) -> str:
    return b.add(b.fma(b.mul(b.horner(s, _SIN), s), r, rest), r)


def _cosine_of(b: MathBody, r: str, rest: str, s: str) -> str:
    return b.fma(b.fma(b.horner(s, _COS), s, -0.5), s, b.fma(rest, b.neg(r), 1.0))


def _with_sign_of_bits(b: MathBody, value: str, sign: str) -> str:
    """``value`` negated where the top bit of ``sign`` is set."""
    return b.from_bits(b.integer("xor", b.bits(value), b.integer("and", sign, -(1 << 31))))


def sin(b: MathBody, x: str) -> str:
    """Right for arguments up to ``REDUCTION_LIMIT``."""
    # On the magnitude, with the sign put back at the end: the polynomial would lose the sign of -0.
    r, rest, n, odd = _quadrant(b, b.fabs(x))
    s = b.mul(r, r)
    value = b.select(odd, _cosine_of(b, r, rest, s), _sine_of(b, r, rest, s))
    return _with_sign_of_bits(b, value, b.integer("xor", b.integer("shl", n, 30), b.bits(x)))


def cos(b: MathBody, x: str) -> str:
    """Right for arguments up to ``REDUCTION_LIMIT``."""
    r, rest, n, odd = _quadrant(b, b.fabs(x))
    s = b.mul(r, r)
    value = b.select(odd, _sine_of(b, r, rest, s), _cosine_of(b, r, rest, s))
    return _with_sign_of_bits(b, value, b.integer("shl", b.integer("add", n, 1), 30))


def tan(b: MathBody, x: str) -> str:
    """Right for arguments up to ``REDUCTION_LIMIT``."""
    r, rest, _, odd = _quadrant(b, b.fabs(x))
    s = b.mul(r, r)
    rest = b.fma(rest, s, rest)  # the slope reaches 2
    beyond = b.fma(b.mul(b.horner(s, _TAN), s), r, rest)
    value = b.add(beyond, r)
    lost = b.sub(beyond, b.sub(value, r))
    inverse = b.div(-1.0, value)
    # One step of Newton's iteration, for the part of the value that rounding took too.
    error = b.fma(inverse, lost, b.fma(inverse, value, 1.0))
    value = b.select(odd, b.fma(inverse, error, inverse), value)
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
