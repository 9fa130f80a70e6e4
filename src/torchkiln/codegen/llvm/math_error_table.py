"""The float32 error function with AVX-512, whose registers hold tables of 16 numbers.

One polynomial for each of 16 intervals takes half of the instructions of what has to fit them all, and one less
exponential: gelu of 768 × 1024 numbers on a Zen 4 takes 0.51 of the time. Conventions and accuracy are those of
:mod:`torchkiln.codegen.llvm.math_exponential`.
"""

from __future__ import annotations

from torchkiln.codegen.llvm.instructions import double_literal
from torchkiln.codegen.llvm.math_body import MathBody, VectorType, float32
from torchkiln.codegen.llvm.math_exponential import rounded

LANES = 16
"""Lanes that the function is written for, as many as a table has numbers."""

# Interval k lies around k * _WIDTH. The last one ends at 3.9215: from 3.9193 on, erf rounds to 1.
_WIDTH = 0.253
_FARTHEST = 3.92
_FIRST = 0x4B400000  # the bits that stand for interval 0
# erf(c + d) = erf(c) + d P(d) by interval, and x + x P(x) in the first. Each c is one near the middle whose erf is
# nearly a float32. The error is 2**-25 of the result.
_MIDDLES = (
    *(0.0, 0.253001541, 0.505999446, 0.759021044, 1.01203978, 1.26495349, 1.51796019, 1.77104616),
    *(2.02404189, 2.27697635, 2.53005457, 2.78305125, 3.03547168, 3.28723454, 3.53022838, 3.83235145),
)
_ERF_OF_MIDDLES = (
    *(0.0, 0.27950567, 0.52575624, 0.716916323, 0.847638667, 0.926371396, 0.968184412, 0.987742305),
    *(0.995795906, 0.998718679, 0.999653816, 0.99991709, 0.999982357, 0.999996662, 0.999999404, 0.99999994),
)
_COEFFICIENTS = (  # of each power in turn, the highest first
    (
        *(0.110857375, 0.081578657, 0.00626043882, -0.0540572442, -0.0683250725, -0.0452163443),
        *(-0.0129815573, 0.00751661463, 0.0130269602, 0.0101627139, 0.00564175751, 0.00246075355),
        *(0.000878048479, 0.000261582376, 6.67605855e-05, 4.4504719e-05),
    ),
    (
        *(0.000312677788, 0.127309486, 0.182180166, 0.147696525, 0.0651540235, -0.0091371173),
        *(-0.0454284698, -0.047170639, -0.0328710862, -0.0177441835, -0.00779925101, -0.00286267675),
        *(-0.000891754404, -0.00023796696, -5.77839528e-05, -1.81074608e-06),
    ),
    (
        *(-0.376143575, -0.30769065, -0.142079234, 0.0321779214, 0.141595855, 0.167063609),
        *(0.135503858, 0.0861404315, 0.0449869707, 0.019741917, 0.00736711547, 0.00235841866),
        *(0.000653005205, 0.000157215691, 3.48536087e-05, 4.30085993e-06),
    ),
    (
        *(3.20330571e-07, -0.267776668, -0.441982567, -0.48139751, -0.410051286, -0.288147837),
        *(-0.171008557, -0.086791873, -0.0379734784, -0.0143930037, -0.00473765796, -0.00135878182),
        *(-0.0003411652, -7.52024498e-05, -1.54034351e-05, -1.86678824e-06),
    ),
    (
        *(0.128379166, 1.05841517, 0.873494744, 0.634238183, 0.405172557, 0.227791369),
        *(0.112655483, 0.0490055196, 0.0187612176, 0.00632124487, 0.00187266315, 0.000488294754),
        *(0.000112415924, 2.28827139e-05, 4.36566006e-06, 4.71949221e-07),
    ),
)


def erf_by_table(b: MathBody, x: str) -> str:
    """erf on :data:`LANES` lanes."""
    assert b.type == VectorType("float", LANES)
    near = b.at_most(b.fabs(x), _FARTHEST)
    _, interval = rounded(b, near, 1 / _WIDTH, 0)
    d = b.sub(near, _chosen(b, _MIDDLES, interval))
    highest, *others = _COEFFICIENTS
    polynomial = _chosen(b, highest, interval)
    for numbers in others:
        polynomial = b.fma(polynomial, d, _chosen(b, numbers, interval))
    first = b.int_compare("eq", interval, _FIRST)
    start = b.select(first, near, _chosen(b, _ERF_OF_MIDDLES, interval))
    return b.copysign(b.fma(polynomial, d, start), x)


def _chosen(b: MathBody, numbers: tuple[float, ...], interval: str) -> str:
    """For each lane the number of its interval, which the low four bits of an integer name."""
    symbol = "@llvm.x86.avx512.permvar.sf.512"
    b.module.declare(f"declare {b.type.value} {symbol}({b.type.value}, {b.type.integer})")
    table = ", ".join(f"float {double_literal(float32(number))}" for number in numbers)
    return b.fresh(f"call {b.type.value} {symbol}({b.type.value} <{table}>, {b.type.integer} {interval})")
