"""Single numbers of a graph that are known only at run time: read from tensors, computed from sizes, checked."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx

from torchkiln.errors import UnsupportedError
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue
from torchkiln.ir.index import Index
from torchkiln.ir.program import CheckSizes, Comparison, ReadNumber
from torchkiln.lowering.builder import Builder, TensorValue


def read_number(builder: Builder, node: torch.fx.Node, x: TensorValue) -> Any:
    """``x.item()``: a size from here on, or a float, read now: ``x`` may be written to before the number is used."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymFloat):
        return builder.pointwise((), torch.float64, lambda _: x.at([ix.ZERO] * len(x.shape))).value  # of any rank
    extent = builder.sizes.extent(value) if isinstance(value, torch.SymInt) else None
    size = None if extent is None else builder.sizes.decide(extent)
    if size is None or x.dtype.is_floating_point or x.dtype == torch.uint64:
        raise UnsupportedError(f"a number of {x.dtype} read from a tensor")
    builder.operations.append(ReadNumber(size, builder.materialize(x), builder.origin))
    return extent


_COMPARISONS: dict[Any, str] = {
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.eq: "eq",
    operator.ne: "ne",
}
_ARITHMETIC: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.neg: "neg",
    operator.pow: "pow",
    math.sqrt: "sqrt",
    getattr(torch, "_sym_sqrt", math.sqrt): "sqrt",
    torch.sym_float: "float",
}


def run_time_number(node: torch.fx.Node, args: tuple[Any, ...]) -> Expr | Comparison:
    """A float, or the truth of a comparison, that arithmetic on numbers known at run time gives."""
    if all(isinstance(a, (int, Index)) for a in args) and node.target in _COMPARISONS:
        return Comparison(_COMPARISONS[node.target], *args)
    name = _ARITHMETIC.get(node.target)
    if name is None or not all(isinstance(a, (int, float, Index, Expr)) for a in args):
        raise UnsupportedError(f"{node.target} on numbers known only at run time")
    values = [_float(a) for a in args]
    return values[0] if name == "float" else ex.simplify(name, tuple(values), torch.float64)


def _float(value: int | float | Index | Expr) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, Index):
        return ex.cast(IndexValue(value, torch.int64), torch.float64)
    return Constant(float(value), torch.float64)


def truth(builder: Builder, condition: Comparison) -> TensorValue:
    """A comparison of sizes as a 0-dim tensor."""
    left, right = (IndexValue(ix.as_index(e), torch.int64) for e in (condition.left, condition.right))
    return builder.pointwise((), torch.bool, lambda _: ex.simplify(condition.name, (left, right), torch.bool))


def check_number(builder: Builder, node: torch.fx.Node, condition: Any, message: str) -> None:
    """``torch._check`` and the like on sizes that depend on data."""
    if isinstance(condition, Comparison):
        left, right = (IndexValue(ix.as_index(e), torch.int64) for e in (condition.left, condition.right))
        always = ex.simplify(condition.name, (left, right), torch.bool)
        if not (isinstance(always, Constant) and always.value):
            builder.operations.append(CheckSizes(condition, message, builder.origin))
    elif condition is not True:
        raise UnsupportedError(f"a check of {condition}")


def ignore_range(builder: Builder, node: torch.fx.Node, *_: Any, **__: Any) -> None:
    """Limits of a size: torch has them in its ranges already, and those are checked where the size becomes known."""

