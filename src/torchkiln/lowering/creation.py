"""Tensors made from nothing: constants, ranges, masks by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue
from torchkiln.ir.index import Extent, Index
from torchkiln.lowering.builder import Builder, TensorValue, dimension_variables
from torchkiln.lowering.pointwise import compare, number, op, where
from torchkiln.lowering.registry import NotLowered, lowers


def _filled(
    builder: Builder, shape: Sequence[Extent], value: Any, dtype: torch.dtype | None, kwargs: dict[str, Any]
) -> TensorValue:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise NotLowered("creation on another device")
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotLowered("creation with a sparse layout")
    assert builder.node is not None
    val = builder.node.meta["val"]
    sizes = tuple(shape)
    if isinstance(value, TensorValue):
        return builder.pointwise(sizes, val.dtype, lambda i: value.at(()))
    constant = builder.convert(number(value, _number_dtype(value, val.dtype)), val.dtype)
    # No buffer: a constant is written out only where something needs it in memory.
    return TensorValue(sizes, val.dtype, dimension_variables(sizes), constant)


def _number_dtype(value: Any, dtype: torch.dtype) -> torch.dtype:
    if isinstance(value, bool) or dtype == torch.bool:
        return torch.bool
    return torch.float64 if dtype.is_floating_point else dtype


@lowers("full.default")
def lower_full(
    builder: Builder, size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> TensorValue:
    return _filled(builder, size, value, dtype, kwargs)


@lowers("full_like.default")
def lower_full_like(
    builder: Builder, x: TensorValue, value: Any, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> TensorValue:
    return _filled(builder, x.shape, value, dtype, kwargs)


@lowers("zeros.default", "ones.default", "empty.memory_format")
def lower_uniform(
    builder: Builder, size: Sequence[int], *, dtype: torch.dtype | None = None, **kwargs: Any
) -> TensorValue:
    assert builder.node is not None
    return _filled(builder, size, 1 if "ones" in str(builder.node.target) else 0, dtype, kwargs)


@lowers("zeros_like.default", "ones_like.default", "empty_like.default")
def lower_uniform_like(
    builder: Builder, x: TensorValue, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> TensorValue:
    assert builder.node is not None
    return _filled(builder, x.shape, 1 if "ones" in str(builder.node.target) else 0, dtype, kwargs)


@lowers("new_zeros.default", "new_ones.default", "new_empty.default", "new_full.default")
def lower_new(
    builder: Builder,
    x: TensorValue,
    size: Sequence[int],
    value: Any = 0,
    *,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> TensorValue:
    assert builder.node is not None
    return _filled(builder, size, 1 if "new_ones" in str(builder.node.target) else value, dtype, kwargs)


@lowers("empty_strided.default", "new_empty_strided.default")
def lower_empty_strided(builder: Builder, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> TensorValue:
    size = args[-2]  # a tensor may come before, the strides come after: outputs get eager's strides anyway
    return _filled(builder, size, 0, dtype, kwargs)


@lowers("scalar_tensor.default")
def lower_scalar_tensor(
    builder: Builder, value: Any, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> TensorValue:
    return _filled(builder, (), value, dtype, kwargs)


@lowers("fill.Scalar", "fill.Tensor")
def lower_fill(builder: Builder, x: TensorValue, value: Any) -> TensorValue:
    if isinstance(value, TensorValue):
        return builder.pointwise(x.shape, x.dtype, lambda i: value.at(()))
    return _filled(builder, x.shape, value, x.dtype, {})


@lowers("arange.start_step", "arange.default", "arange.start", "iota.default")
def lower_arange(builder: Builder, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> TensorValue:
    assert builder.node is not None
    val = builder.node.meta["val"]
    if "iota" in str(builder.node.target):
        start, step = kwargs.get("start", 0), kwargs.get("step", 1)
    else:
        start, step = (0 if len(args) == 1 else args[0]), (args[2] if len(args) > 2 else 1)
    count = builder.sizes.extent(val.shape[0])
    result = val.dtype
    whole = isinstance(start, int | Index) and isinstance(step, int | Index)
    if whole:
        return _positions(count, start, step, result)
    if not result.is_floating_point:
        raise NotLowered("fractional range converted to integers")
    inner = torch.float64

    def element(i: tuple[Index, ...]) -> Expr:
        position = builder.convert(IndexValue(i[0], torch.int64), inner)
        return op("add", op("mul", position, Constant(float(step), inner)), Constant(float(start), inner))

    return builder.pointwise((count,), result, element)


def _positions(count: Extent, start: Extent, step: Extent, dtype: torch.dtype) -> TensorValue:
    dims = dimension_variables((count,))
    value: Expr = IndexValue(ix.of(dims[0]) * step + start, torch.int64)
    return TensorValue((count,), dtype, dims, ex.cast(value, dtype))


@lowers("tril.default", "triu.default")
def lower_triangle(builder: Builder, x: TensorValue, diagonal: int = 0) -> TensorValue:
    assert builder.node is not None
    name = "le" if "tril" in str(builder.node.target) else "ge"

    def element(i: tuple[Index, ...]) -> Expr:
        distance = IndexValue(i[-1] - i[-2], torch.int64)
        keep = compare(name, distance, Constant(diagonal, torch.int64))
        return where(keep, x.at(i), number(0, x.dtype))

    return builder.pointwise(x.shape, x.dtype, element)
