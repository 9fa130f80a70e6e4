"""Float32 functions that CPUs take from a library, for cards, which have none: through float64 where that is exact."""

from __future__ import annotations

import math

from torchkiln.codegen.llvm.math_body import MathBody, VectorType
from torchkiln.codegen.llvm.math_exponential import log1p

# Bits that a quotient keeps in a step of fmod: times the 24 of a float32 they fit a float64.
_QUOTIENT_BITS = 28


def fmod(b: MathBody, x: str, y: str) -> str:
    """The rest of a division towards zero, exact.

    Multiples of the divisor are taken away until less than it is left, of 2**26 times as much in each step: the
    quotient is rounded down to a few bits, so that its product with the divisor and what is left are float64 numbers.
    Float32 numbers are at most 2**277 apart, which takes eleven steps; most divisions take one.
    """
    wide = b.on(VectorType("double", b.type.lanes))
    value, most = wide.type.value, _widened(b, wide, x)
    divisor = _widened(b, wide, y)
    defined = wide.both(wide.compare("ogt", divisor, 0.0), wide.compare("olt", most, math.inf))
    start = wide.select(defined, most, 0.0)
    b.branch("turn")
    b.start_block("turn")
    b.lines.append(f"  %rest = phi {value} [ {start}, %entry ], [ %next, %step ]")
    more = wide.both(defined, wide.compare("oge", "%rest", divisor))
    b.emit(f"br i1 {_any(b, more)}, label %step, label %done")
    b.start_block("step")
    # A little less, so that rounding never makes it more than the quotient is.
    quotient = wide.mul(wide.div("%rest", divisor), 1 - 2.0**-50)
    quotient = wide.from_bits(wide.integer("and", wide.bits(quotient), -(1 << (53 - _QUOTIENT_BITS))))
    quotient = wide.at_least(wide.intrinsic("floor", quotient), 1.0)
    left = wide.fma(wide.neg(quotient), divisor, "%rest")
    b.lines.append(f"  %next = select {wide.type.mask} {more}, {value} {left}, {value} %rest")
    b.branch("turn")
    b.start_block("done")
    rest = b.copysign(_narrowed(b, wide, "%rest"), x)
    return b.select(defined, rest, math.nan)


def hypot(b: MathBody, x: str, y: str) -> str:
    """The root of the sum of squares, which neither overflow nor vanish in float64; infinite where one side is."""
    wide = b.on(VectorType("double", b.type.lanes))
    first, second = _widened(b, wide, x), _widened(b, wide, y)
    root = wide.intrinsic("sqrt", wide.fma(first, first, wide.mul(second, second)))
    result = _narrowed(b, wide, root)
    for side in (x, y):
        result = b.select(b.compare("oeq", b.fabs(side), math.inf), math.inf, result)
    return result


def atanh(b: MathBody, x: str) -> str:
    """``log1p(2 x / (1 - x)) / 2``, odd; what rounding took from the quotient is carried along."""
    size = b.fabs(x)
    twice, below = b.add(size, size), b.sub(1.0, size)
    quotient = b.div(twice, below)
    lost_below = b.sub(b.sub(1.0, below), size)
    lost = b.sub(b.fma(b.neg(quotient), below, twice), b.mul(quotient, lost_below))
    more = b.div(lost, b.add(size, 1.0))  # the inverse of 1 + quotient is (1 - x) / (1 + x)
    more = b.select(b.compare("olt", size, 1.0), more, 0.0)
    return b.copysign(b.mul(log1p(b, quotient, more), 0.5), x)


def _widened(b: MathBody, wide: MathBody, x: str) -> str:
    return wide.fresh(f"fpext {b.type.value} {b.fabs(x)} to {wide.type.value}")


def _narrowed(b: MathBody, wide: MathBody, x: str) -> str:
    return b.fresh(f"fptrunc {wide.type.value} {x} to {b.type.value}")


def _any(b: MathBody, condition: str) -> str:
    """Whether a condition holds in some lane."""
    if b.type.lanes == 1:
        return condition
    bits = b.fresh(f"bitcast {b.type.mask} {condition} to i{b.type.lanes}")
    return b.fresh(f"icmp ne i{b.type.lanes} {bits}, 0")
