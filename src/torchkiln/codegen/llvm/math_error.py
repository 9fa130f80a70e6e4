"""The error function, its complement and its inverse.

Float32 ones are polynomials in vector instructions with the conventions and accuracy of
:mod:`torchkiln.codegen.llvm.math_exponential` (erfc and erfinv within 3 units in the last place).
"""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody
from torchkiln.codegen.llvm.math_exponential import between, exp_times, log, scaled_exp
from torchkiln.codegen.llvm.math_library import define_library_function

# erf(x) = x + x P(x**2) for |x| <= 0.9; the error is 2**-26.
_ERF_SMALL = (-0.000605344598, 0.00500434591, -0.0267733987, 0.112819783, -0.376125067, 0.128379151)
# log(1 - erf(x)) = P(x) for 0.9 <= x <= 4; the error of the resulting erf is 2**-29.
_ERF_LARGE = (
    *(0.000197183457, -0.00305561628, 0.0222771037, -0.104037374, -0.637059748, -1.12774956),
    -0.000177494847,
)
# erfc(x) = exp(-x**2) P(t) / x with t = (x - 4) / (x + 4), for 0.78 <= x <= 10.1; the error is 2**-28.
_ERFC = (
    *(0.00305950874, -0.0102058984, 0.0249383226, -0.0488247126, 0.0784281865, -0.104997829),
    *(0.116177194, -0.101670213, 0.0597234666, 0.547997832),
)
# erfinv(x) = x P(w) with w = -log(1 - x**2), for w < 5, and x P(sqrt(w) - 3) beyond; errors 2**-24.7, 2**-23.3.
_ERFINV_CENTRE = (
    *(-5.61881874e-09, 1.51632065e-07, -1.34634558e-06, 9.12754956e-07, 5.32338272e-05),
    *(-0.00014175137, -0.00232122513, 0.0115427291, 0.232014835, 0.886226892),
)
_ERFINV_TAIL = (
    *(-0.00014891052, 7.14361813e-05, 0.00127964455, -0.00364379631, 0.00577012124),
    *(-0.00763083342, 0.00943444762, 1.00167477, 2.83297706),
)
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
    t = b.div(b.sub(z, 4.0), b.add(z, 4.0))
    square = b.mul(z, z)
    rest = b.fma(b.neg(z), z, square)  # what rounding took from -z**2
    tail = exp_times(b, b.neg(square), rest, b.div(b.horner(t, _ERFC), z))
    far = b.select(b.compare("olt", x, 0.0), b.sub(2.0, tail), tail)
    # 1 - erf(x) with 1 - x first, which is exact where the result is small.
    near = b.fma(b.horner(b.mul(x, x), _ERF_SMALL), b.neg(x), b.sub(1.0, x))
    return b.select(b.compare("ogt", a, 0.9), far, near)


def erfinv(b: MathBody, x: str) -> str:
    a = b.fabs(x)
    # 1 - a is exact where it is small, and the product with 1 + a rounds once.
    w = b.neg(log(b, b.mul(b.sub(1.0, a), b.add(a, 1.0))))
    centre = b.horner(w, _ERFINV_CENTRE)
    tail = b.horner(b.sub(b.intrinsic("sqrt", w), 3.0), _ERFINV_TAIL)
    result = b.mul(b.select(b.compare("olt", w, 5.0), centre, tail), x)
    return b.select(b.compare("oeq", a, 1.0), b.copysign(math.inf, x), result)


def erfinv_double(b: MathBody, x: str) -> str:
    """In double, with logarithm, exponential and error function from the library."""

    def library(name: str, value: str) -> str:
        return b.call(define_library_function(b.module, name, b.type, 1), value)

    a = b.fabs(x)
    rest = b.sub(1.0, a)
    w = b.neg(library("log", b.mul(rest, b.add(a, 1.0))))
    centre = b.horner(w, _START_CENTRE)
    tail = b.horner(b.sub(b.intrinsic("sqrt", w), 4.0), _START_TAIL)
    y = b.mul(b.select(b.compare("olt", w, 5.0), centre, tail), a)
    # One step of Halley's iteration, which triples the digits, on erf(y) = a; beyond 1/2 on erfc(y) = 1 - a, which
    # keeps them.
    small = b.compare("olt", a, 0.5)
    error = b.select(small, b.sub(library("erf", y), a), b.sub(rest, library("erfc", y)))
    slope = b.mul(library("exp", b.neg(b.mul(y, y))), 2 / math.sqrt(math.pi))
    step = b.div(error, slope)
    y = b.sub(y, b.div(step, b.fma(y, step, 1.0)))
    y = b.select(b.compare("oeq", a, 1.0), math.inf, y)
    # A tiny argument has a residual that underflows; its first-order term is all there is.
    y = b.select(b.compare("olt", a, 1e-150), b.mul(a, math.sqrt(math.pi) / 2), y)
    return b.copysign(y, x)
