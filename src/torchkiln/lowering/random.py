"""Random operators that a seed makes pure: one random operation per element, at its place in the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchkiln.graph.dtypes import HALF
from torchkiln.graph.seeded import coarse_grid
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, Op, index_value, literal, op
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, compute_dtype
from torchkiln.lowering.registry import lowers


@lowers("kiln::random.default")
def lower_random(
    builder: Builder,
    seed: TensorValue,
    stream: int,
    distribution: str,
    size: Sequence[int],
    order: Sequence[int] | None,
    dtype: torch.dtype,
    scale: float = 1.0,
    shift: float = 0.0,
) -> TensorValue:
    inner = compute_dtype(dtype)

    def element(i: Subscripts) -> Expr:
        value: Expr = Op(f"random_{distribution}", _operands(seed, stream, i, size), inner)
        if dtype in HALF and distribution != "normal":
            value = _coarse(value, dtype, distribution)
        if scale != 1 or shift != 0:
            # One rounding, so that it does not matter whether the compiler would have fused the two.
            value = op("fma", value, literal(scale, inner), literal(shift, inner))
        return value

    return builder.pointwise(size, dtype, element)


def _coarse(value: Expr, dtype: torch.dtype, distribution: str) -> Expr:
    """Numbers of [0, 1), or (0, 1), truncated to what ``dtype`` holds; every step is exact."""
    steps, middle = coarse_grid(dtype, distribution)
    floored = op("floor", value * steps)
    return (floored + middle if middle else floored) * (1 / steps)


@lowers("kiln::randint.default")
def lower_randint(
    builder: Builder,
    seed: TensorValue,
    stream: int,
    low: int,
    high: int,
    size: Sequence[int],
    order: Sequence[int] | None,
) -> TensorValue:
    count = high - low
    if count >= 1 << 63:
        count -= 1 << 64  # as 64 bits that are read without a sign

    def element(i: Subscripts) -> Expr:
        operands = (*_operands(seed, stream, i, size), Constant(count, torch.int64))
        return Op("random_integer", operands, torch.int64) + low

    return builder.pointwise(size, torch.int64, element)


def _operands(seed: TensorValue, stream: int, subscripts: Subscripts, size: Sequence[int]) -> tuple[Expr, Expr, Expr]:
    place = ix.flatten(subscripts, ix.contiguous_strides(size))
    return seed.at((ix.ZERO,)), Constant(stream, torch.int64), index_value(place)
