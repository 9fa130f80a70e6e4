"""Single numbers of a graph that are known only at run time: read from tensors, computed from sizes, checked."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torchkiln.errors import UnsupportedError
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, IndexValue, Op, Scalar, index_value, literal, op
from torchkiln.ir.index import Extent, Index
from torchkiln.ir.ops import COMPARISONS
from torchkiln.ir.program import CheckFits, CheckSizes, ReadNumber
from torchkiln.lowering.builder import Builder, TensorValue


def read_number(builder: Builder, node: Node, x: TensorValue) -> Any:
    """``x.item()``: a size from here on, or a float, read now: ``x`` may be written to before the number is used."""
    return number_in(builder, node.meta.get("val"), x)


def number_in(builder: Builder, value: Any, x: TensorValue) -> Any:
    """The one element of ``x``, which torch knows as ``value``."""
    if isinstance(value, torch.SymFloat):
        return builder.pointwise((), torch.float64, lambda _: x.at([ix.ZERO] * len(x.shape))).value  # of any rank
    extent: Any = None
    if isinstance(value, torch.SymBool):
        extent = builder.sizes.of_symbol(value)
    elif isinstance(value, torch.SymInt):
        extent = builder.sizes.extent(value)
    size = None if extent is None else builder.sizes.decide(extent)
    if size is None or x.dtype.is_floating_point or x.dtype == torch.uint64:
        raise UnsupportedError(f"a number of {x.dtype} read from a tensor")
    builder.sizes.numbers.add(size)
    builder.operations.append(ReadNumber(size, builder.materialize(builder.on_cpu(x)), builder.origin))
    return _compared("ne", extent, 0) if isinstance(value, torch.SymBool) else extent


_COMPARISONS: dict[Any, str] = {getattr(operator, name): name for name in sorted(COMPARISONS)}
_ARITHMETIC: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.neg: "neg",
    operator.pow: "pow",
    math.sqrt: "sqrt",
    getattr(torch, "_sym_sqrt", math.sqrt): "sqrt",
}
_LOGIC: dict[Any, str] = {
    operator.and_: "logical_and",
    operator.or_: "logical_or",
    operator.xor: "logical_xor",
    operator.not_: "logical_not",
    torch.sym_not: "logical_not",
}
# Integers in, integers out: Python's have no limit, so that only what comes out of all of them must fit.
_ON_INTEGERS = frozenset((operator.add, operator.sub, operator.mul, operator.neg, operator.floordiv, operator.mod))


def integer_arithmetic(builder: Builder, node: Node, args: tuple[Any, ...]) -> Extent:
    """The integer that arithmetic on numbers known at run time gives, which must fit where it is used."""
    value = node.meta["val"]
    if node.target in (math.trunc, torch.sym_int, int) and len(args) == 1 and isinstance(args[0], Expr):
        return ix.extent(builder.sizes.truncated(value, literal(args[0], torch.float64)))
    extent = builder.sizes.extent(value)
    used = any(user.target not in _ON_INTEGERS for user in node.users)
    if isinstance(extent, Index) and used and builder.sizes.may_wrap(extent):
        builder.operations.append(CheckFits(extent, builder.origin))
    return extent


def scalar_arithmetic(node: Node, args: tuple[Any, ...]) -> Expr:
    """The float, or the boolean, that arithmetic on numbers known at run time gives."""
    if all(isinstance(a, (bool, int, float, Index, Expr)) for a in args):
        if node.target in _COMPARISONS:
            return _compared(_COMPARISONS[node.target], *args)
        if node.target in _LOGIC:
            return op(_LOGIC[node.target], *map(_condition, args))
        floats = [literal(a, torch.float64) for a in args]
        if node.target in _ARITHMETIC:
            return op(_ARITHMETIC[node.target], *floats)
        if node.target is torch.sym_float:
            return floats[0]
    raise UnsupportedError(f"{node.target} on numbers known only at run time")


def _compared(name: str, left: Scalar, right: Scalar) -> Expr:
    """A comparison, of integers as such."""
    if isinstance(left, (int, Index)) and isinstance(right, (int, Index)):
        return op(name, index_value(left), index_value(right))
    return op(name, literal(left, torch.float64), literal(right, torch.float64))


def _condition(value: Scalar) -> Expr:
    if isinstance(value, Expr) and value.dtype == torch.bool:
        return value
    return Constant(value, torch.bool) if isinstance(value, bool) else _compared("ne", value, 0)


def check_number(builder: Builder, node: Node, condition: Any, message: str) -> None:
    """``torch._check`` and the like on sizes that depend on data."""
    if not isinstance(condition, (bool, Expr)):
        raise UnsupportedError(f"a check of {condition}")
    condition = _condition(condition)
    if isinstance(condition, Constant) and condition.value:
        return
    if isinstance(condition, Op) and all(isinstance(side, IndexValue) for side in condition.args):
        left, right = (ix.extent(side.index) for side in condition.args if isinstance(side, IndexValue))
        check = CheckSizes(condition.name, left, right, message, builder.origin)
    else:
        check = CheckSizes("ne", builder.sizes.of_condition(condition), 0, message, builder.origin)
    builder.operations.append(check)


def ignore_range(builder: Builder, node: Node, *_: Any, **__: Any) -> None:
    """Limits of a size: torch has them in its ranges already, and those are checked where the size becomes known."""

