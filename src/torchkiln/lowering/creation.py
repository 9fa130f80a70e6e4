"""Tensors made from nothing: constants, ranges, masks by position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue
from torchkiln.ir.index import Extent, Index
from torchkiln.lowering.builder import Builder, TensorValue, dimension_variables
from torchkiln.lowering.pointwise import compare, number, op, where
from torchkiln.lowering.registry import NotLowered, lowers


def _filled(builder: Builder, shape: Sequence[Extent], value: Any, kwargs: dict[str, Any]) -> TensorValue:
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
def lower_full(builder: Builder, size: Sequence[int], value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, size, value, kwargs)


@lowers("full_like.default")
def lower_full_like(builder: Builder, x: TensorValue, value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, x.shape, value, kwargs)


@lowers("new_full.default")
def lower_new_full(
    builder: Builder, x: TensorValue, size: Sequence[int], value: Any, **kwargs: Any
) -> TensorValue:
    return _filled(builder, size, value, kwargs)


for _name, _value in (("zeros", 0), ("ones", 1), ("empty", 0)):
    lowers(f"{_name}.default", f"{_name}.memory_format")(partial(lower_full, value=_value))
    lowers(f"{_name}_like.default")(partial(lower_full_like, value=_value))
    lowers(f"new_{_name}.default")(partial(lower_new_full, value=_value))


@lowers("empty_strided.default")
def lower_empty_strided(builder: Builder, size: Sequence[int], stride: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, size, 0, kwargs)  # outputs get eager's strides anyway


@lowers("new_empty_strided.default")
def lower_new_empty_strided(
    builder: Builder, x: TensorValue, size: Sequence[int], stride: Any, **kwargs: Any
) -> TensorValue:
    return _filled(builder, size, 0, kwargs)


@lowers("scalar_tensor.default")
def lower_scalar_tensor(builder: Builder, value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, (), value, kwargs)


@lowers("fill.Scalar", "fill.Tensor")
def lower_fill(builder: Builder, x: TensorValue, value: Any) -> TensorValue:
    if isinstance(value, TensorValue):
        return builder.pointwise(x.shape, x.dtype, lambda i: value.at(()))
    return _filled(builder, x.shape, value, {})


@lowers("arange.default")
def lower_arange(builder: Builder, end: Any, **kwargs: Any) -> TensorValue:
    return _range(builder, 0, 1)


@lowers("arange.start", "arange.start_step")
def lower_arange_from(builder: Builder, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> TensorValue:
    return _range(builder, start, step)


@lowers("iota.default")
def lower_iota(builder: Builder, length: Any, *, start: Any = 0, step: Any = 1, **kwargs: Any) -> TensorValue:
    return _range(builder, start, step)


def _range(builder: Builder, start: Any, step: Any) -> TensorValue:
    assert builder.node is not None
    val = builder.node.meta["val"]
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


def lower_triangle(comparison: str, builder: Builder, x: TensorValue, diagonal: Extent = 0) -> TensorValue:
    def element(i: tuple[Index, ...]) -> Expr:
        distance = IndexValue(i[-1] - i[-2], torch.int64)
        keep = compare(comparison, distance, number(diagonal, torch.int64))
        return where(keep, x.at(i), number(0, x.dtype))

    return builder.pointwise(x.shape, x.dtype, element)


lowers("tril.default")(partial(lower_triangle, "le"))
lowers("triu.default")(partial(lower_triangle, "ge"))
