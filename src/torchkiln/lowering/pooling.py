"""Averages of windows that lie side by side: adaptive pooling to a divisor of the size, and its gradient.

Windows of several lengths, and symbolic sizes, are left to the library.
Microseconds of one thread of a busy Zen 5, 8 x 64 x 56 x 56 to 7 x 7, eager and here:

| layout | float32 | with the gradient | bfloat16 | with the gradient |
|---|---|---|---|---|
| contiguous | 473, 98 | 857, 338 | 800, 94 | 1493, 338 |
| channels last | 129, 80 | 474, 347 | 102, 55 | 715, 202 |
| permuted | 783, 135 | 1440, 573 | 894, 104 | 1632, 337 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torchkiln.ir.expr import Expr
from torchkiln.ir.index import Extent
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, compute_dtype
from torchkiln.lowering.registry import NotLowered, lowers


def _average(builder: Builder, x: TensorValue, output_size: Sequence[Extent]) -> TensorValue:
    rank, inner = len(output_size), compute_dtype(x.dtype)
    windows = _windows(x.shape[-rank:], output_size)

    def element(place: Subscripts, within: Subscripts) -> Expr:
        inside = (p * size + k for p, size, k in zip(place[-rank:], windows, within, strict=True))
        return builder.load(x, (*place[:-rank], *inside), inner)

    total = builder.reduce("sum", (*x.shape[:-rank], *output_size), windows, element)
    return builder.pointwise(total.shape, x.dtype, lambda i: total.at(i) / math.prod(windows))


def _gradient(rank: int, builder: Builder, gradient: TensorValue, x: TensorValue) -> TensorValue:
    windows = _windows(x.shape[-rank:], gradient.shape[-rank:])

    def element(i: Subscripts) -> Expr:
        windows_of = (p // size for p, size in zip(i[-rank:], windows, strict=True))
        return builder.load(gradient, (*i[:-rank], *windows_of), compute_dtype(x.dtype)) / math.prod(windows)

    return builder.pointwise(x.shape, x.dtype, element)


for _rank in (2, 3):
    lowers(f"_adaptive_avg_pool{_rank}d")(_average)
    lowers(f"_adaptive_avg_pool{_rank}d_backward")(partial(_gradient, _rank))


def _windows(before: Sequence[Extent], after: Sequence[Extent]) -> list[int]:
    """How many elements each dimension of a window has."""
    found = []
    for size, parts in zip(before, after, strict=True):
        if not isinstance(size, int) or not isinstance(parts, int) or size * parts == 0 or size % parts:
            raise NotLowered("windows of several lengths, empty ones, or symbolic sizes")
        found.append(size // parts)
    return found
