"""Float32 power: a base-2 logarithm in double precision, then an exponential in single precision.

Both signs of zero, infinities, NaN and negative bases are those of C's ``pow``, which eager follows.
"""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.math_exponential import exp2_of_parts, split

# log2(1 + f) = f * P(f) for -1/4 <= f < 1/2. The relative error 2**-32.6 times the largest exponent (150) is a quarter
# of a float32 unit in the last place of the result.
_LOG2 = (
    *(-0.04622322614835566, 0.11724789706311206, -0.15346983913933437, 0.16451387517277527),
    *(-0.18020985114759303, 0.20581817467683136, -0.24043375744501536, 0.28854639937263354),
    *(-0.36067424742938231, 0.48089827561538179, -0.72134751751450454, 1.4426950410088797),
)
_ROUNDER = 1.5 * 2.0**52


def pow_(b: MathBody, x: str, y: str) -> str:
    a = b.fabs(x)
    magnitude = _magnitude(b, a, y)
    magnitude = b.select(b.compare("oeq", a, 1.0), 1.0, magnitude)

    # The sign, and NaN for a negative finite base with a fractional exponent.
    whole = b.compare("oeq", b.intrinsic("rint", y), y)
    half = b.mul(y, 0.5)
    odd = b.both(whole, b.compare("une", b.intrinsic("rint", half), half))
    result = b.select(odd, b.copysign(magnitude, x), magnitude)
    negative = b.both(b.compare("olt", x, 0.0), b.compare("ogt", x, -math.inf))
    fractional = b.fresh(f"xor {b.type.mask} {whole}, {b.type.splat('i1', 'true')}")
    result = b.select(b.both(negative, fractional), math.nan, result)

    # 1**y and x**0 are 1 even for NaN.
    result = b.select(b.compare("oeq", x, 1.0), 1.0, result)
    return b.select(b.compare("oeq", y, 0.0), 1.0, result)


def _magnitude(b: MathBody, a: str, y: str) -> str:
    """``a**y`` for a >= 0, except where a is 1 or y is 0 and the product y log a is no number."""
    e, f = split(b, a)
    # 0 and infinity get an infinite exponent and NaN a NaN one, whatever their bits made of the fraction.
    e = b.select(b.compare("olt", a, math.inf), e, a)
    e = b.select(b.compare("oeq", a, 0.0), -math.inf, e)
    d = b.on(VectorType("double", b.type.lanes))

    def widened(value: str) -> str:
        return b.fresh(f"fpext {b.type.value} {value} to {d.type.value}")

    f2 = widened(f)
    logarithm = d.fma(d.split_horner(f2, d.mul(f2, f2), _LOG2), f2, widened(e))
    exponent = d.mul(logarithm, widened(y))
    exponent = d.at_most(d.at_least(exponent, -151.0), 129.0)
    n = d.sub(d.add(exponent, _ROUNDER), _ROUNDER)

    def narrowed(value: str) -> str:
        return b.fresh(f"fptrunc {d.type.value} {value} to {b.type.value}")

    return exp2_of_parts(b, narrowed(n), narrowed(d.sub(exponent, n)))
