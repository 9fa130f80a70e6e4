"""Float32 exponentials, logarithms and the sigmoid as polynomials in vector instructions.

Every function takes the body to append to and the names of its arguments, and returns the name of its result. There are
no calls, so nothing is spilled. The coefficients are minimax fits of our own (least squares, reweighted by what the
error means for the result), rounded to float32 from the lowest power up, the rest fitted again after each. Where
roundings would exceed 1.5 ulp, the lost part of one is carried along; docs/precision.md has the errors that are left.
NaN, infinities, signed zeros and denormals are those of IEEE arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torchkiln.codegen.llvm.instructions import join_lanes, take_lanes
from torchkiln.codegen.llvm.math_body import MathBody, float32

_INF = math.inf
_NAN = math.nan

# Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits of the sum: shorter than rounding and
# converting, and defined for NaN, where a conversion to an integer is poison.
_ROUNDER = 12582912.0

_LOG2_E = 1.44269504
# ln 2 in two parts, the first short enough that its product with an exponent is exact.
_LN2_HIGH = 0.693145752
_LN2_LOW = 1.42860677e-6

# e**f = 1 + f + f**2 * P(f) for |f| <= ln(2) / 2; the error is 2**-28.
_EXP = (0.00138186978, 0.00836871564, 0.0416682921, 0.166665211, 0.49999994)
# The same with the error relative to e**f - 1, 2**-26.
_EXPM1 = (0.00138698472, 0.00836644694, 0.0416674465, 0.16666545, 0.49999997)
# 2**f = 1 + f * P(f) for |f| <= 1/2; the error is 2**-28.
_EXP2 = (0.000153264627, 0.00133908063, 0.00961850584, 0.0555035993, 0.240226477, 0.693147182)
# log(1 + f) = f + f**2 * P(f) for -1/4 <= f < 1/2; the error is 2**-27.6 of the result.
_LOG1P = (
    *(-0.0451501496, 0.104729638, -0.13164711, 0.144779593, -0.166468844, 0.199908271),
    *(-0.250001073, 0.333334506, -0.5),
)
_THREE_QUARTERS = 0x3F400000  # the bits of 0.75


def _fills_avx512(b: MathBody) -> bool:
    return b.type.lanes % 16 == 0 and b.module.target.sleef_bits == 512


def rounded(b: MathBody, x: str, factor: float, bias: int) -> tuple[str, str]:
    """The integer nearest to ``x * factor``, as a value and plus ``bias`` in the low bits of an integer."""
    shifted = b.fma(x, factor, _ROUNDER + bias)
    return b.sub(shifted, _ROUNDER + bias), b.bits(shifted)


def _reduced_exp(b: MathBody, x: str, bias: int) -> tuple[str, str, str]:
    """``(n, bits, f)`` with ``x = n ln 2 + f`` and ``n + bias`` in the low bits of ``bits``."""
    n, bits = rounded(b, x, _LOG2_E, bias)
    return n, bits, b.fma(n, -_LN2_LOW, b.fma(n, -_LN2_HIGH, x))


def _exp_polynomial(b: MathBody, f: str) -> str:
    return b.fma(b.fma(b.horner(f, _EXP), f, 1.0), f, 1.0)


def _growth(b: MathBody, f: str) -> str:
    """``e**f - 1`` to a float32's last place of e**f."""
    return b.fma(b.mul(b.horner(f, _EXP), f), f, f)


def _scale(b: MathBody, x: str, n: str, bits: str, vanishes: str) -> str:
    """``x * 2**n``, correct into the denormals and to infinity; ``bits`` is n with a bias of 254.

    Lanes that ``vanishes`` selects are 0: underflow takes 13 times as long on x86, and a masked softmax is full of it.
    """
    if _fills_avx512(b):
        return _scale_avx512(b, x, n, vanishes)
    # Two factors, because 2**n itself need not be a float32. The exponent field of the first is half of n + 254, that
    # of the second the other half; what is above those bits is shifted out.
    first = b.integer("and", b.integer("shl", bits, 22), -(1 << 23))
    second = b.integer("sub", b.integer("shl", bits, 23), first)
    return b.mul(b.select(vanishes, 0.0, b.mul(x, b.from_bits(first))), b.from_bits(second))


def _scale_avx512(b: MathBody, x: str, n: str, vanishes: str) -> str:
    """The same by the instruction that does just this; exp then takes 0.76 of the time."""
    symbol = "@llvm.x86.avx512.mask.scalef.ps.512"
    vector = "<16 x float>"
    b.module.declare(f"declare {vector} {symbol}({vector}, {vector}, {vector}, i16, i32)")
    kept = b.fresh(f"xor {b.type.mask} {vanishes}, {b.type.splat('i1', 'true')}")
    pieces = []
    for start in range(0, b.type.lanes, 16):
        value, exponent = (take_lanes(b, "float", b.type.lanes, v, range(start, start + 16)) for v in (x, n))
        mask = b.fresh(f"bitcast <16 x i1> {take_lanes(b, 'i1', b.type.lanes, kept, range(start, start + 16))} to i16")
        operands = f"{vector} {value}, {vector} {exponent}, {vector} zeroinitializer, i16 {mask}, i32 4"
        pieces.append(b.fresh(f"call {vector} {symbol}({operands})"))
    return join_lanes(b, "float", 16, pieces)


def scaled_exp(b: MathBody, x: str, shift: int) -> str:
    """``2**shift * e**x`` where the caller knows that the power of two nearest to the result is a normal float32."""
    _, bits, f = _reduced_exp(b, x, 127 + shift)
    return b.mul(_exp_polynomial(b, f), b.from_bits(b.integer("shl", bits, 23)))


def scaled_exp_in_parts(b: MathBody, x: str, shift: int) -> tuple[str, str]:
    """As :func:`scaled_exp`, and what rounding took from it."""
    _, bits, f = _reduced_exp(b, x, 127 + shift)
    growth = _growth(b, f)
    near = b.add(growth, 1.0)
    lost = b.sub(growth, b.sub(near, 1.0))
    power = b.from_bits(b.integer("shl", bits, 23))
    return b.mul(near, power), b.mul(lost, power)


def between(b: MathBody, x: str, low: float, high: float) -> str:
    """``x`` clamped to the range; NaN stays. A lower limit also keeps denormals, which are slow, out of a path."""
    return b.at_most(b.at_least(x, low), high)


def exp(b: MathBody, x: str) -> str:
    n, bits, f = _reduced_exp(b, between(b, x, -104.0, 89.0), 254)
    return _scale(b, _exp_polynomial(b, f), n, bits, b.compare("ole", x, -104.0))


def exp_times(b: MathBody, x: str, rest: str, factor: str, factor_rest: str) -> str:
    """``(factor + factor_rest) * e**(x + rest)`` for x <= 0, or NaN, and rests below the last place.

    The exponential itself is never rounded.
    """
    clamped = b.at_least(x, -126.0)
    n, bits = rounded(b, clamped, _LOG2_E, 254)
    high, low = b.fma(n, -_LN2_HIGH, clamped), b.fma(n, -_LN2_LOW, rest)
    f = b.add(high, low)
    factor_rest = b.fma(factor, b.sub(low, b.sub(f, high)), factor_rest)
    curved = b.mul(b.mul(b.horner(f, _EXP), f), f)  # e**f - 1 - f
    product = b.fma(factor, f, b.fma(factor, curved, factor_rest))
    return _scale(b, b.add(factor, product), n, bits, b.compare("ole", x, -126.0))


def exp2(b: MathBody, x: str) -> str:
    clamped = between(b, x, -151.0, 129.0)
    n, bits = rounded(b, clamped, 1.0, 254)
    return _scale(b, b.horner(b.sub(clamped, n), _EXP2, 1.0), n, bits, b.compare("ole", x, -151.0))


def exp2_of_parts(b: MathBody, n: str, f: str) -> str:
    """``2**(n + f)`` for a whole n from -151 to 129 and |f| <= 1/2."""
    bits = b.bits(b.add(n, _ROUNDER + 254))
    return _scale(b, b.horner(f, _EXP2, 1.0), n, bits, b.compare("ole", n, -151.0))


def expm1(b: MathBody, x: str) -> str:
    clamped = between(b, x, -20.0, 89.0)
    _, bits, f = _reduced_exp(b, clamped, 126)
    beyond = b.mul(b.horner(f, _EXPM1), f)
    r = b.fma(beyond, f, f)  # e**f - 1
    lost = b.fma(beyond, f, b.sub(f, r))
    # Half of 2**n, which is a float32 even for n = 128; the doubling comes last.
    half = b.from_bits(b.integer("shl", bits, 23))
    grown = b.fma(half, lost, b.fma(half, r, b.sub(half, 0.5)))
    result = b.select(b.compare("oeq", half, 0.5), r, b.add(grown, grown))
    return b.copysign(result, x)


def split(b: MathBody, x: str) -> tuple[str, str]:
    """``(e, f)`` with ``x = 2**e (1 + f)`` and -1/4 <= f < 1/2, for positive finite x."""
    denormal = b.compare("olt", x, 2.0**-126)
    x = b.select(denormal, b.mul(x, 2.0**23), x)
    bias = b.select(denormal, -23.0, 0.0)
    bits = b.bits(x)
    exponent = b.integer("and", b.integer("sub", bits, _THREE_QUARTERS), -(1 << 23))
    f = b.sub(b.from_bits(b.integer("sub", bits, exponent)), 1.0)
    return b.fma(b.int_to_float(exponent), 2.0**-23, bias), f


def _log1p_rest(b: MathBody, f: str) -> str:
    """``log(1 + f) - f``."""
    s = b.mul(f, f)
    return b.mul(b.split_horner(f, s, _LOG1P), s)


def _log_domain(b: MathBody, x: str, result: str) -> str:
    """``result`` where a logarithm of x is finite; what IEEE asks for elsewhere."""
    result = b.select(b.compare("olt", x, _INF), result, x)
    below = b.select(b.compare("oeq", x, 0.0), -_INF, _NAN)
    return b.select(b.compare("ole", x, 0.0), below, result)


def _logarithm(b: MathBody, x: str, finish: Callable[[str, str], str]) -> str:
    """The logarithm that ``finish`` makes of e and f, where ``x = 2**e (1 + f)``."""
    if _fills_avx512(b):
        return finish(*_split_avx512(b, x))
    return _log_domain(b, x, finish(*split(b, x)))


def _split_avx512(b: MathBody, x: str) -> tuple[str, str]:
    """As ``split`` by the instructions that do just this; e is infinite for 0 and infinity, f is NaN below 0.

    With nothing left to repair afterwards, the logarithm takes 0.61 of the time.
    """
    vector = "<16 x float>"
    getexp, getmant = (f"@llvm.x86.avx512.mask.get{part}.ps.512" for part in ("exp", "mant"))
    b.module.declare(f"declare {vector} {getexp}({vector}, {vector}, i16, i32)")
    b.module.declare(f"declare {vector} {getmant}({vector}, i32, {vector}, i16, i32)")
    all_lanes = f"{vector} zeroinitializer, i16 -1, i32 4"
    exponents, mantissas = [], []
    for start in range(0, b.type.lanes, 16):
        piece = take_lanes(b, "float", b.type.lanes, x, range(start, start + 16))
        # 11: a mantissa from 3/4 to 3/2, and NaN for a negative number.
        mantissa = b.fresh(f"call {vector} {getmant}({vector} {piece}, i32 11, {all_lanes})")
        of_piece, of_mantissa = (
            b.fresh(f"call {vector} {getexp}({vector} {v}, {all_lanes})") for v in (piece, mantissa)
        )
        exponents.append(b.fresh(f"fsub {vector} {of_piece}, {of_mantissa}"))
        mantissas.append(mantissa)
    e, m = (join_lanes(b, "float", 16, pieces) for pieces in (exponents, mantissas))
    return e, b.sub(m, 1.0)


def log(b: MathBody, x: str) -> str:
    return _logarithm(b, x, lambda e, f: b.fma(e, math.log(2), b.add(f, _log1p_rest(b, f))))


def log2(b: MathBody, x: str) -> str:
    def finish(e: str, f: str) -> str:
        product, rest = _in_base(b, f, 1 / math.log(2))
        return b.add(b.add(e, product), rest)

    return _logarithm(b, x, finish)


def log10(b: MathBody, x: str) -> str:
    high = 0.301025391  # 10 bits: its product with e is exact
    low = math.log10(2) - high

    def finish(e: str, f: str) -> str:
        product, rest = _in_base(b, f, 1 / math.log(10))
        return b.fma(e, high, b.add(product, b.fma(e, low, rest)))

    return _logarithm(b, x, finish)


def _in_base(b: MathBody, f: str, factor: float) -> tuple[str, str]:
    """``log(1 + f) * factor`` in two parts, the second a small one: the sum with an exponent may be smaller than the
    first, and its rounding would show.
    """
    product = b.mul(f, factor)
    lost = b.fma(f, factor, b.neg(product))
    lost = b.fma(f, factor - float32(factor), lost)
    return product, b.fma(_log1p_rest(b, f), factor, lost)


def log1p(b: MathBody, x: str, more: str | None = None) -> str:
    """``log(1 + x)``, and ``more`` where it is given: less than the result, and added before it is rounded."""
    one_more = b.bits(b.add(x, 1.0))
    exponent = b.integer("and", b.integer("sub", one_more, _THREE_QUARTERS), -(1 << 23))
    # f = x 2**-e + (2**-e - 1), so that x + 1 is never rounded. 2**-128 is no normal float32, hence the quarter; it
    # would lose bits of a denormal x, which needs no scaling.
    scale = b.from_bits(b.integer("sub", 0x40800000, exponent))
    scaled = b.fma(b.mul(x, 0.25), scale, b.fma(scale, 0.25, -1.0))
    f = b.select(b.int_compare("eq", exponent, 0), x, scaled)
    e = b.mul(b.int_to_float(exponent), 2.0**-23)
    rest = _log1p_rest(b, f)
    result = b.fma(e, math.log(2), b.add(f, rest if more is None else b.add(rest, more)))
    result = b.copysign(result, x)
    result = b.select(b.compare("olt", x, _INF), result, x)
    below = b.select(b.compare("oeq", x, -1.0), -_INF, _NAN)
    return b.select(b.compare("ole", x, -1.0), below, result)


def sigmoid(b: MathBody, x: str) -> str:
    # Below -20 the exponential no longer changes 1 + e; the clamp keeps it out of the slow denormals.
    argument = between(b, b.neg(x), -20.0, 89.0)
    # Half of it first: twice that may be infinite, as it should be, but 2**128 is no float32.
    # Three roundings add up to 2.4 ulp, as in eager. To carry them along takes 1.55 times the time.
    return b.div(1.0, b.fma(scaled_exp(b, argument, -1), 2.0, 1.0))


def sigmoid_from_exp(b: MathBody, exp_symbol: str) -> str:
    """The sigmoid of ``%x`` through a call of the exponential, on any element type."""
    return b.div(1.0, b.add(b.call(exp_symbol, b.neg("%x")), 1.0))
