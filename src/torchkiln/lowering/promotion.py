"""Type promotion of elementwise operators, as eager does it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchkiln.ir.expr import Expr, Scalar
from torchkiln.ir.index import Index
from torchkiln.lowering.builder import Builder, TensorValue

Operand = TensorValue | Scalar


def _category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    return 2 if dtype.is_floating_point else 3 if dtype.is_complex else 1


def _scalar_dtype(builder: Builder, value: Scalar) -> torch.dtype:
    if isinstance(value, bool) or (isinstance(value, Expr) and value.dtype == torch.bool):
        return torch.bool
    return torch.int64 if isinstance(value, (int, Index)) else builder.target.default_float


def promote(builder: Builder, operands: Iterable[Operand]) -> torch.dtype:
    """The common dtype: tensors with dimensions decide within their kind, then 0-dim tensors, then numbers."""
    groups: dict[int, torch.dtype] = {}
    for operand in operands:
        if isinstance(operand, TensorValue):
            rank, dtype = (0 if operand.shape else 1), operand.dtype
        else:
            rank, dtype = 2, _scalar_dtype(builder, operand)
        groups[rank] = torch.promote_types(groups[rank], dtype) if rank in groups else dtype
    ordered = [groups[rank] for rank in sorted(groups)]
    result = ordered[0]
    for dtype in ordered[1:]:
        if _category(dtype) > _category(result):
            result = dtype
    return result


def promote_to_float(builder: Builder, operands: Iterable[Operand]) -> torch.dtype:
    """Like :func:`promote`, integers and bool becoming the default float dtype."""
    dtype = promote(builder, operands)
    return dtype if dtype.is_floating_point else builder.target.default_float
