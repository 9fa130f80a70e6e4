"""The error function, its complement and its inverse.

Conventions and accuracy of float32 are those of :mod:`torchkiln.codegen.llvm.math_exponential`.
"""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody, Operand, in_float32_parts
from torchkiln.codegen.llvm.math_exponential import between, exp_times, log, scaled_exp
from torchkiln.codegen.llvm.math_library import library

# erf(x) = x + x P(x**2) for |x| <= 0.9; the error is 2**-26.
_ERF_SMALL = (-0.000605344598, 0.00500434591, -0.0267733987, 0.112819783, -0.376125067, 0.128379151)
# log(1 - erf(x)) = P(x) for 0.9 <= x <= 4; the error of the resulting erf is 2**-29.
_ERF_LARGE = (
    *(0.000197183457, -0.00305561628, 0.0222771037, -0.104037374, -0.637059748, -1.12774956),
    -0.000177494847,
)
# The same with an error of 2**-30, for erfc(x) = (1 - x) - x P(x**2), which is smaller.
_ERFC_SMALL = (
    *(7.96397362e-05, -0.000804380456, 0.00519203069, -0.0268556383, 0.112836249, -0.376126289),
    0.128379166,
)
# erfc(x) = exp(-x**2) P(t) / x with t = (x - 2) / (x + 2), for 0.79 <= x <= 10.2; the error is 2**-28.8. The last
# coefficient is used in two parts.
_ERFC = (
    *(-9.32088369e-05, -0.000760471681, 0.00103616144, 0.00479921978, -0.00750178006, -0.0289786346),
    *(0.121514067, -0.203844205, 0.167211026),
)
_ERFC_LAST = 0.5107913521060392
# erfinv(x) = x P(w) with w = -log(1 - x**2), for w < 5, and x P(sqrt(w) - 3) beyond; errors 2**-27.4, 2**-26.5. The
# last coefficients are used in two parts.
_ERFINV_CENTRE = (
    *(-8.77701645e-09, 2.20722853e-07, -1.97365625e-06, 3.96952419e-06, 4.46039849e-05),
    *(-0.000127545267, -0.00233423873, 0.011548629, 0.232013822),
)
_ERFINV_CENTRE_LAST = 0.8862269205237661
_ERFINV_TAIL = (
    *(0.000116071285, -0.000309507275, -5.79938242e-05, 0.00148517673, -0.00359627022),
    *(0.00568686752, -0.00763768377, 0.00944530778, 1.00167501),
)
_ERFINV_TAIL_LAST = 2.832976801242445
# Starts for double, to be refined: the same centre to 2**-27, the tail in sqrt(w) - 4 as far as double goes (w < 37.5)
# to 2**-22.
_START_CENTRE = (
    *(-8.791025376e-09, 2.210307292e-07, -1.976463608e-06, 3.983251541e-06, 4.456516916e-05),
    *(-0.0001274815518, -0.002334296303, 0.01154865399, 0.232013818, 0.8862269205),
)
_START_TAIL = (
    *(1.036227284e-06, -2.60100028e-06, -1.07288801e-05, 4.183486252e-05, -3.604623904e-05, 1.322840629e-05),
    *(-0.0001084242629, 0.0003566161907, -0.0008748452591, 0.001248648509, 1.00949403, 3.839784377),
)


def erf(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    complement = scaled_exp(b, b.horner(between(b, a, 0.5, 4.0), _ERF_LARGE), 0)
    large = b.copysign(b.sub(1.0, complement), x)
    small = b.fma(b.horner(b.mul(x, x), _ERF_SMALL), x, x)
    return b.select(b.compare("ogt", a, 0.9), large, small)


def erfc(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    z = between(b, a, 0.5, 10.5)
    t = b.div(b.sub(z, 2.0), b.add(z, 2.0))
    square = b.mul(z, z)
    rest = b.fma(b.neg(z), z, square)  # what rounding took from -z**2
    polynomial, polynomial_rest = _in_parts(b, b.horner(t, _ERFC), t, *in_float32_parts(_ERFC_LAST))
    inverse = b.div(1.0, z)
    factor = b.mul(polynomial, inverse)
    factor_rest = b.mul(b.add(b.fma(b.neg(factor), z, polynomial), polynomial_rest), inverse)
    tail = exp_times(b, b.neg(square), rest, factor, factor_rest)
    far = b.select(b.compare("olt", x, 0.0), b.sub(2.0, tail), tail)
    # 1 - erf(x) with 1 - x first, which is exact where the result is small; elsewhere what it lost comes in again.
    first = b.sub(1.0, x)
    lost = b.sub(b.sub(1.0, first), x)
    near = b.add(b.fma(b.horner(b.mul(x, x), _ERFC_SMALL), b.neg(x), lost), first)
    # From 0.813 on the result is below 1/4, and its last place half as large.
    return b.select(b.compare("ogt", a, 0.81), far, near)


def erfinv(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    # 1 - a is exact where it is small, and the product with 1 + a rounds once.
    w = b.neg(log(b, b.mul(b.sub(1.0, a), b.add(a, 1.0))))
    root = b.sub(b.intrinsic("sqrt", w), 3.0)
    central = b.compare("olt", w, 5.0)
    factor = b.select(central, b.horner(w, _ERFINV_CENTRE), b.horner(root, _ERFINV_TAIL))
    centre, tail = (in_float32_parts(last) for last in (_ERFINV_CENTRE_LAST, _ERFINV_TAIL_LAST))
    high, low = (b.select(central, *parts) for parts in zip(centre, tail, strict=True))
    polynomial, rest = _in_parts(b, factor, b.select(central, w, root), high, low)
    result = b.fma(polynomial, x, b.mul(rest, x))
    return b.select(b.compare("oeq", a, 1.0), b.copysign(math.inf, x), result)


def _in_parts(b: MathBody, factor: str, x: str, high: Operand, low: Operand) -> tuple[str, str]:
    """``factor * x + high + low``, and what rounding took from it; ``high`` is the largest."""
    total = b.fma(factor, x, high)
    return total, b.add(b.fma(factor, x, b.sub(high, total)), low)


def erfinv_double(b: MathBody, x: str) -> str:
    """In double, with logarithm, exponential and error function from the library."""
    a = b.fabs(x)
    rest = b.sub(1.0, a)
    w = b.neg(library(b, "log", b.mul(rest, b.add(a, 1.0))))
    centre = b.horner(w, _START_CENTRE)
    tail = b.horner(b.sub(b.intrinsic("sqrt", w), 4.0), _START_TAIL)
    y = b.mul(b.select(b.compare("olt", w, 5.0), centre, tail), a)
    # One step of Halley's iteration, which triples the digits, on erf(y) = a; beyond 1/2 on erfc(y) = 1 - a, which
    # keeps them.
    small = b.compare("olt", a, 0.5)
    error = b.select(small, b.sub(library(b, "erf", y), a), b.sub(rest, library(b, "erfc", y)))
    slope = b.mul(library(b, "exp", b.neg(b.mul(y, y))), 2 / math.sqrt(math.pi))
    step = b.div(error, slope)
    y = b.sub(y, b.div(step, b.fma(y, step, 1.0)))
    y = b.select(b.compare("oeq", a, 1.0), math.inf, y)
    # A tiny argument has a residual that underflows; its first-order term is all there is.
    y = b.select(b.compare("olt", a, 1e-150), b.mul(a, math.sqrt(math.pi) / 2), y)
    return b.copysign(y, x)
