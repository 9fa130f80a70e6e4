"""Tensors made from nothing: constants, ranges, triangles."""

from __future__ import annotations

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


def lower_filled(value: Any, builder: Builder, *_: object, **kwargs: Any) -> TensorValue:
    """A tensor of one ``value``, of the shape and dtype that torch worked out. What is empty is filled with 0."""
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotLowered("creation with a sparse layout")
    ((known,), shape) = builder.results, builder.result_shape
    if isinstance(value, TensorValue):
        return builder.pointwise(shape, known.dtype, lambda _: value.at(()))
    constant = builder.convert(number(value, _number_dtype(value, known.dtype)), known.dtype)
    # No buffer: a constant is written out only where something needs it in memory.
    return TensorValue(shape, known.dtype, dimension_variables(shape), constant)


def _number_dtype(value: Any, dtype: torch.dtype) -> torch.dtype:
    if isinstance(value, bool) or dtype == torch.bool:
        return torch.bool
    return torch.float64 if dtype.is_floating_point else dtype


for _name, _value in (("zeros", 0), ("ones", 1), ("empty", 0)):
    lowers(_name, f"{_name}_like", f"new_{_name}")(partial(lower_filled, _value))
lowers("empty_strided", "new_empty_strided")(partial(lower_filled, 0))  # outputs get eager's strides anyway


@lowers("full", "full_like", "fill")
def lower_full(builder: Builder, like: object, value: Any, **kwargs: Any) -> TensorValue:
    return lower_filled(value, builder, **kwargs)


@lowers("new_full")
def lower_new_full(builder: Builder, like: object, size: object, value: Any, **kwargs: Any) -> TensorValue:
    return lower_filled(value, builder, **kwargs)


@lowers("scalar_tensor")
def lower_scalar_tensor(builder: Builder, value: Any, **kwargs: Any) -> TensorValue:
    return lower_filled(value, builder, **kwargs)


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
    ((known,), (count,)) = builder.results, builder.result_shape
    dtype = known.dtype
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
