"""Tensors made from nothing: constants, ranges, triangles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Expr, index_value, op, where
from torchkiln.ir.index import Extent, Index
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, dimension_variables
from torchkiln.lowering.pointwise import number
from torchkiln.lowering.registry import NotLowered, lowers


def _filled(builder: Builder, shape: Sequence[Extent], value: Any, kwargs: dict[str, Any]) -> TensorValue:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        raise NotLowered("creation on another device")
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotLowered("creation with a sparse layout")
    (known,) = builder.results
    sizes = tuple(shape)
    if isinstance(value, TensorValue):
        return builder.pointwise(sizes, known.dtype, lambda i: value.at(()))
    constant = builder.convert(number(value, _number_dtype(value, known.dtype)), known.dtype)
    # No buffer: a constant is written out only where something needs it in memory.
    return TensorValue(sizes, known.dtype, dimension_variables(sizes), constant)


def _number_dtype(value: Any, dtype: torch.dtype) -> torch.dtype:
    if isinstance(value, bool) or dtype == torch.bool:
        return torch.bool
    return torch.float64 if dtype.is_floating_point else dtype


@lowers("full")
def lower_full(builder: Builder, size: Sequence[Extent], value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, size, value, kwargs)


@lowers("full_like")
def lower_full_like(builder: Builder, x: TensorValue, value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, x.shape, value, kwargs)


@lowers("new_full")
def lower_new_full(builder: Builder, x: TensorValue, size: Sequence[Extent], value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, size, value, kwargs)


for _name, _value in (("zeros", 0), ("ones", 1), ("empty", 0)):
    lowers(_name)(partial(lower_full, value=_value))
    lowers(f"{_name}_like")(partial(lower_full_like, value=_value))
    lowers(f"new_{_name}")(partial(lower_new_full, value=_value))


@lowers("empty_strided")
def lower_empty_strided(builder: Builder, size: Sequence[Extent], stride: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, size, 0, kwargs)  # outputs get eager's strides anyway


@lowers("new_empty_strided")
def lower_new_empty_strided(
    builder: Builder, x: TensorValue, size: Sequence[Extent], stride: Any, **kwargs: Any
) -> TensorValue:
    return _filled(builder, size, 0, kwargs)


@lowers("scalar_tensor")
def lower_scalar_tensor(builder: Builder, value: Any, **kwargs: Any) -> TensorValue:
    return _filled(builder, (), value, kwargs)


lowers("fill")(lower_full_like)


@lowers("arange.default")
def lower_arange(builder: Builder, end: Any, **kwargs: Any) -> TensorValue:
    return _range(builder, 0, 1)


@lowers("arange.start", "arange.start_step")
def lower_arange_from(builder: Builder, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> TensorValue:
    return _range(builder, start, step)


@lowers("iota")
def lower_iota(builder: Builder, length: Any, *, start: Any = 0, step: Any = 1, **kwargs: Any) -> TensorValue:
    return _range(builder, start, step)


def _range(builder: Builder, start: Any, step: Any) -> TensorValue:
    (known,) = builder.results
    count, dtype = builder.sizes.extent(known.shape[0]), known.dtype
    if isinstance(start, int | Index) and isinstance(step, int | Index):
        dims = dimension_variables((count,))
        return TensorValue((count,), dtype, dims, ex.cast(index_value(ix.of(dims[0]) * step + start), dtype))
    if not dtype.is_floating_point:
        raise NotLowered("fractional range converted to integers")

    def element(i: Subscripts) -> Expr:
        return builder.convert(index_value(i[0]), torch.float64) * float(step) + float(start)

    return builder.pointwise((count,), dtype, element)


def lower_triangle(comparison: str, builder: Builder, x: TensorValue, diagonal: Extent = 0) -> TensorValue:
    def element(i: Subscripts) -> Expr:
        return where(op(comparison, index_value(i[-1] - i[-2]), number(diagonal, torch.int64)), x.at(i), 0)

    return builder.pointwise(x.shape, x.dtype, element)


lowers("tril")(partial(lower_triangle, "le"))
lowers("triu")(partial(lower_triangle, "ge"))
