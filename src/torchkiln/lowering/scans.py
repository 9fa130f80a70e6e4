"""Running sums and products: native code where eager's results have a type it accumulates, else torch's operator.

A running sum between two flips along its dimension, as the gradients of ``cumsum`` and ``cumprod`` have it, runs from
the end.
"""

from __future__ import annotations

import itertools

import torch

from torchkiln.graph.flips import is_between_flips
from torchkiln.graph.native_operators import SCAN
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Load
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.program import StridedView
from torchkiln.lowering.builder import (
    Builder,
    NewTensor,
    Subscripts,
    TensorValue,
    compute_dtype,
    indices,
    is_dense,
    normalize_dim,
    same_strides,
    view_of,
)
from torchkiln.lowering.registry import NotLowered, lowers

# Elements of a row further apart are copied first, in tiles where rows run along another dimension. (Running sums along
# rows of 768 x 1024 float32 numbers, one thread of a busy Xeon with AMX, µs of eager, copied first, and read in place:
# rows of a wider tensor 780, 1275, 800, every second element 960, 1440, 900, one row expanded 590, 1090, 700.)
_MOST_APART = 8

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.int64})


@lowers("cumsum")
def lower_cumsum(builder: Builder, x: TensorValue, dim: int, *, dtype: torch.dtype | None = None) -> TensorValue:
    return _scan(builder, x, dim, "sum")


@lowers("cumprod")
def lower_cumprod(builder: Builder, x: TensorValue, dim: int, *, dtype: torch.dtype | None = None) -> TensorValue:
    return _scan(builder, x, dim, "prod")


def _scan(builder: Builder, x: TensorValue, dim: int, reducer: str) -> TensorValue:
    (result,) = builder.results
    shape, strides = builder.sizes.extents(result.shape), builder.sizes.strides(result.stride())
    if builder.device != "cpu":
        raise NotLowered("a scan on another device than the CPU")
    if result.dtype not in DTYPES:
        raise NotLowered("a scan of numbers of a type that native code does not accumulate")
    if not shape or 0 in shape or not is_dense(shape, strides):
        raise NotLowered("a scan of one number, of none, or into memory with gaps")
    at = normalize_dim(dim, len(shape))
    if not ix.moves(shape[at]):
        if reducer == "sum" and result.dtype.is_floating_point:
            wide = compute_dtype(result.dtype)
            return builder.pointwise(shape, result.dtype, lambda i: builder.load(x, i, wide) + 0.0)  # -0.0 is 0.0 then
        return builder.pointwise(shape, result.dtype, lambda i: builder.load(x, i, result.dtype))
    backward = is_between_flips(builder.node, at)
    source = _flipped(_definition(builder, x), at) if backward else x
    outer = [size for k, size in enumerate(shape) if k != at and _is_outside(strides[k], strides[at])]
    folded = (ix.product(outer), shape[at], strides[at])
    flat = _rows(builder, source, result.dtype, folded, strides, at) if strides[at] == 1 else None
    if flat is None:
        view = _source(builder, source, result.dtype, strides)
        flat = StridedView(view.buffer, view.dtype, folded, ix.contiguous_strides(folded), view.offset)
    (made,) = builder.extern(SCAN, (flat, reducer, backward), [NewTensor(shape, result.dtype, strides)])
    assert isinstance(made, TensorValue)
    return _flipped(made, at) if backward else made


def _rows(
    builder: Builder,
    x: TensorValue,
    dtype: torch.dtype,
    folded: tuple[Extent, ...],
    strides: tuple[Extent, ...],
    at: int,
) -> StridedView | None:
    """What is scanned along dimension ``at`` of memory as it lies: rows equally far apart, their elements too."""
    view = builder.strided_view(x) if x.dtype == dtype else None
    if view is None:
        return None
    apart = view.strides[at]
    if not isinstance(apart, int) or not 1 <= apart <= _MOST_APART:
        return None
    others = [k for k in range(len(view.shape)) if k != at and ix.moves(view.shape[k])]
    others.sort(key=lambda k: ix.hint_of(strides[k]), reverse=True)
    for outer, inner in itertools.pairwise(others):
        if view.strides[outer] != ix.product((view.strides[inner], view.shape[inner])):
            return None
    pitch = view.strides[others[-1]] if others else folded[1]
    return StridedView(view.buffer, view.dtype, folded, (pitch, apart, 1), view.offset)


def _source(builder: Builder, x: TensorValue, dtype: torch.dtype, strides: tuple[Extent, ...]) -> StridedView:
    """What is scanned, in memory as the result lies."""
    view = builder.strided_view(x) if x.dtype == dtype else None
    if view is not None and same_strides(view.shape, view.strides, strides):
        return view
    copied = builder.pointwise(x.shape, dtype, lambda i: builder.load(x, i, dtype), strides)
    return builder.materialize(copied)


def _is_outside(stride: Extent, other: Extent) -> bool:
    return ix.hint_of(stride) > ix.hint_of(other)


def _flipped(x: TensorValue, at: int) -> TensorValue:
    def places(i: Subscripts) -> list[Index]:
        return [ix.as_index(x.shape[k]) - 1 - j if k == at else j for k, j in enumerate(i)]

    return view_of(x, x.shape, places)


def _definition(builder: Builder, x: TensorValue) -> TensorValue:
    """What a loop has just stored in the buffer that ``x`` reads, as an expression of its own; else ``x``."""
    if not isinstance(x.value, Load) or x.value.subscripts != indices(x.dims):
        return x
    loop = builder.just_filled(x.value.buffer)
    return x if loop is None else TensorValue(x.shape, x.dtype, loop.ranges, loop.value)
