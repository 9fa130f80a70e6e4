"""Hyperbolic functions and their inverses: float32 from the exponential and the logarithm, double by the library.

Conventions and accuracy are those of :mod:`torchkiln.codegen.llvm.math_exponential`.
"""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody
from torchkiln.codegen.llvm.math_exponential import between, log1p, scaled_exp, scaled_exp_in_parts
from torchkiln.codegen.llvm.math_library import library

# tanh(x) = x + x**3 P(x**2) for |x| <= 0.58; the error is 2**-29.
_TANH = (-0.00604692567, 0.0209121443, -0.0538141392, 0.133322313, -0.333333075)
# sinh(x) = x + x**3 P(x**2) for |x| <= 1; the error is 2**-31.
_SINH = (2.78221319e-06, 0.000198428956, 0.00833331048, 0.166666672)
# From here on sqrt(x**2 + 1) and sqrt(x**2 - 1) are x, and x + 1 is x.
_FAR = 2.0**28


def tanh(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    e = scaled_exp(b, b.mul(between(b, a, 0.5, 10.0), 2.0), 0)
    large = b.sub(1.0, b.div(2.0, b.add(e, 1.0)))
    small = b.odd(a, _TANH)
    # NaN compares false and takes the polynomial, which keeps it.
    return b.copysign(b.select(b.compare("ogt", a, 0.57), large, small), x)


def _quarter_exp(b: MathBody, a: str) -> tuple[str, str, str]:
    """A quarter of e**a, half of what rounding took from e**a, and half of e**-a, for a >= 0.

    A quarter, because half of cosh(89) overflows on the way; beyond 89.5, where a power of two would, it is infinite.
    """
    quarter, lost = scaled_exp_in_parts(b, b.at_most(a, 89.5), -2)
    return quarter, b.add(lost, lost), b.div(0.125, quarter)


def sinh(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    quarter, lost, falling = _quarter_exp(b, a)
    large = b.fma(quarter, 2.0, b.sub(lost, falling))
    small = b.odd(a, _SINH)
    return b.copysign(b.select(b.compare("ogt", a, 1.0), large, small), x)


def cosh(b: MathBody, x: str) -> str:
    quarter, lost, falling = _quarter_exp(b, b.fabs(x))
    return b.fma(quarter, 2.0, b.add(lost, falling))


def asinh(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    far = b.compare("ogt", a, _FAR)
    s = b.mul(a, a)
    root = b.intrinsic("sqrt", b.add(s, 1.0))
    rest = b.div(s, b.add(root, 1.0))
    return b.copysign(_log1p_of(b, far, a, a, rest, root), x)


def acosh(b: MathBody, x: str) -> str:
    far = b.compare("ogt", x, _FAR)
    t = b.sub(x, 1.0)
    root = b.intrinsic("sqrt", b.fma(t, t, b.add(t, t)))
    return b.select(b.compare("olt", x, 1.0), math.nan, _log1p_of(b, far, x, root, t, root))


def _log1p_of(b: MathBody, far: str, x: str, first: str, second: str, root: str) -> str:
    """``log(1 + first + second)``, the second being the smaller, or ``log(2 x)`` where ``far``.

    The inverse of what it is taken of is ``|x - root|``.
    """
    near = b.add(first, second)
    lost = b.sub(second, b.sub(near, first))
    slope = b.fabs(b.sub(x, root))
    # Far out the difference has no digits left, and what was lost does not show.
    more = b.select(b.compare("olt", x, 16.0), b.mul(lost, slope), 0.0)
    return log1p(b, b.select(far, x, near), b.select(far, math.log(2), more))


def growing_double(name: str, b: MathBody, x: str) -> str:
    """sinh or cosh in double. The library's is infinite from 709.8 on, where e**x is, but not yet half of it."""
    a = b.fabs(x)
    far = b.compare("ogt", a, 700.0)
    value = library(b, name, b.select(far, b.sub(a, 11.0), a))
    return b.mul(value, b.select(far, math.exp(11.0), 1.0))


def sinh_double(b: MathBody, x: str) -> str:
    return b.copysign(growing_double("sinh", b, x), x)


def inverse_double(name: str, b: MathBody, x: str) -> str:
    """asinh or acosh in double. The library squares x, which overflows; far out the function is ``log(2 x)``."""
    far = b.add(library(b, "log", x), math.log(2))
    return b.select(b.compare("ogt", x, _FAR), far, library(b, name, x))


def asinh_double(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    value = inverse_double("asinh", b, a)
    return b.copysign(b.select(b.compare("olt", a, 1e-150), a, value), x)
