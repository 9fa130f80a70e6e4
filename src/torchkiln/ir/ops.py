"""The vocabulary of scalar operations, and what each costs.

Arithmetic: add sub mul div neg abs sign maximum minimum fmax fmin floor ceil trunc round sqrt rsqrt reciprocal
floor_divide trunc_divide fmod remainder copysign signbit fma. Comparison: eq ne lt le gt ge isnan isinf. Logic and
bits: logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not. Selection and
conversion: where cast narrow (a cast whose rounding may be skipped) rounded (its operand, not to be rounded
together with what follows). Mathematical functions: those in ``MATH``.
Random numbers: those in ``RANDOM``, pure functions of (seed, stream, position of the element), see
:mod:`torchkiln.graph.seeded`; ``random_integer`` has the size of the range as a fourth operand.

An operation means the same for every dtype it is defined on, and matches eager bit for bit except where noted:
``maximum``/``minimum`` propagate NaN, ``fmax``/``fmin`` ignore it, ``round`` is half-to-even, integer arithmetic
wraps (division by zero gives any number), ``floor_divide`` rounds down and ``trunc_divide`` toward zero, ``remainder``
has the divisor's sign and ``fmod`` the dividend's. Float math functions are within a few ulp.
"""

from __future__ import annotations

from torchkiln.ir.expr import Constant, Expr, IndexValue, Load, Op, walk

MATH = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
        "erf",
        "erfc",
        "erfinv",
        "lgamma",
        "digamma",
        "sigmoid",
        "pow",
        "atan2",
        "hypot",
        "nextafter",
    ]
)

RANDOM = frozenset(["random_uniform", "random_open", "random_normal", "random_integer"])

# Rough cycles per element on a wide vector unit: a division or root costs several multiplies, a transcendental
# function ten or more. Used only to compare recomputing a value with storing it.
_DEAR = {
    "div": 4,
    "sqrt": 4,
    "rsqrt": 6,
    "reciprocal": 4,
    "floor_divide": 8,
    "trunc_divide": 8,
    "fmod": 16,
    "remainder": 16,
    "random_uniform": 24,
    "random_open": 24,
    "random_integer": 48,
    "random_normal": 64,
}


def cost(value: Expr) -> int:
    """Estimated work of evaluating ``value`` once, every distinct node counted once."""
    total = 0
    for node in walk((value,)):
        if isinstance(node, Op):
            total += 12 if node.name in MATH else _DEAR.get(node.name, 1)
        elif isinstance(node, Load) or not isinstance(node, Constant | IndexValue):
            total += 1
    return total
