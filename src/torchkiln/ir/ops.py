"""The vocabulary of scalar operations: operands, result and cost of each.

An operation means the same for every dtype it is defined on, and matches eager bit for bit except where noted:
``maximum``/``minimum`` propagate NaN, ``fmax``/``fmin`` ignore it, ``first_maximum`` is its second operand where that
is greater or NaN and else its first, ``round`` is half-to-even, integer arithmetic wraps (division by zero gives any
number), ``floor_divide`` rounds down and ``trunc_divide`` toward zero, ``remainder`` has the divisor's sign and
``fmod`` the dividend's. Float math functions are within a few ulp. ``narrow`` is a cast whose rounding may be skipped,
``rounded`` is its operand, not to be rounded together with what follows. Random numbers are pure functions of (seed,
stream, index of the element), see :mod:`torchkiln.graph.seeded`; ``random_integer`` has the size of the range as a
fourth operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["arithmetic", "comparison", "test", "logic", "selection", "conversion", "math", "random"]


@dataclass(frozen=True)
class OpSpec:
    """One operation. ``cost`` is in rough cycles per element on a wide vector unit, to compare recomputing a value with
    storing it: a division or a root costs several multiplies, a transcendental function ten or more."""

    name: str
    kind: Kind
    arity: int
    cost: int = 1

    def result(self, operands: Sequence[torch.dtype]) -> torch.dtype:
        """The dtype of the result where operands decide it: in all but conversions and random numbers."""
        return torch.bool if self.kind in ("comparison", "test", "logic") else operands[-1]

    def mistake(self, operands: tuple[torch.dtype, ...], result: torch.dtype) -> str | None:
        """What is wrong with an operation of these dtypes; None where nothing is."""
        if len(operands) != self.arity:
            return f"{self.name} takes {self.arity} operands, not {len(operands)}"
        if self.kind in ("comparison", "test", "logic") and result != torch.bool:
            return f"{self.name} gives {result}, not a bool"
        same: tuple[torch.dtype, ...] = ()
        if self.kind in ("arithmetic", "math"):
            same = (*operands, result)
        elif self.kind == "comparison":
            same = operands
        elif self.kind == "selection":
            same = (*operands[1:], result)
            if operands[0] != torch.bool:
                return f"{self.name} asks a {operands[0]}, not a bool"
        return f"{self.name} mixes {' and '.join(sorted(map(str, set(same))))}" if len(set(same)) > 1 else None


def _specs(kind: Kind, arity: int, names: str, cost: int = 1) -> dict[str, OpSpec]:
    return {name: OpSpec(name, kind, arity, cost) for name in names.split()}


OPS: dict[str, OpSpec] = {
    **_specs("arithmetic", 1, "neg abs sign floor ceil trunc round rounded bitwise_not"),
    **_specs("arithmetic", 2, "add sub mul maximum minimum fmax fmin first_maximum copysign"),
    **_specs("arithmetic", 2, "bitwise_and bitwise_or bitwise_xor"),
    **_specs("arithmetic", 3, "fma"),
    **_specs("arithmetic", 2, "div", 4),
    **_specs("arithmetic", 1, "sqrt reciprocal", 4),
    **_specs("arithmetic", 1, "rsqrt", 6),
    **_specs("arithmetic", 2, "floor_divide trunc_divide", 8),
    **_specs("arithmetic", 2, "fmod remainder", 16),
    **_specs("comparison", 2, "eq ne lt le gt ge"),
    **_specs("test", 1, "isnan isinf signbit"),
    **_specs("logic", 1, "logical_not"),
    **_specs("logic", 2, "logical_and logical_or logical_xor"),
    **_specs("selection", 3, "where"),
    **_specs("conversion", 1, "cast narrow"),
    **_specs("math", 1, "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh", 12),
    **_specs("math", 1, "asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid", 12),
    **_specs("math", 2, "pow atan2 hypot nextafter", 12),
    **_specs("random", 3, "random_uniform random_open", 24),
    **_specs("random", 4, "random_integer", 48),
    **_specs("random", 3, "random_normal", 64),
}


def named(kind: Kind) -> frozenset[str]:
    """The operations of one kind."""
    return frozenset(name for name, spec in OPS.items() if spec.kind == kind)


MATH, RANDOM, COMPARISONS = named("math"), named("random"), named("comparison")
