"""The canonical form of ATen calls that can be written in several ways, so that equal computations look equal.

    t, transpose                      permute
    _unsafe_view                      view
    add, sub, mul, div with .Scalar   .Tensor with a number
    _to_copy to a type                convert_element_type
    x / 8                             x * 0.125, for powers of two
    x - 3                             x + -3
    dimensions counted from the end   counted from the start
    view and expand to -1             the size that is
    a constant times x                x times the constant
    b + a after a + b                 a + b

Every change is exact, to the sign of a zero, and leaves dtype, sizes and strides as they are. It runs on the graphs of
patterns too, so patterns may be written in any of these ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.canonicalize.chains import axes_of
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.graph.nodes import argument_names, fake_tensor
from torchkiln.graph.operators import COMMUTATIVE, CONVERT, named_operators

_aten = torch.ops.aten


def canonicalize(graph_module: torch.fx.GraphModule) -> bool:
    """Give every call of the graph its canonical form; returns whether any had another."""
    changed = False
    written: set[Any] = set()
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for rule in _RULES.get(node.target, ()):
            changed |= rule(node)
        changed |= _count_from_start(node)
        if node.target in COMMUTATIVE:
            changed |= _order_operands(node, written)
    return changed


def _recall(node: torch.fx.Node, target: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Make ``node`` this call, if that gives a value that looks the same.

    That is not in question for elementwise operators of one tensor and a number.
    """
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or any("val" not in source.meta for source in node.all_input_nodes):
        return False
    given = torch.fx.map_arg(args, lambda source: source.meta["val"])
    with value.fake_mode, torch.no_grad():
        if not same_metadata(target(*given), value):
            return False
    node.target, node.args, node.kwargs = target, args, {}
    return True


# -- rules by operator ------------------------------------------------------------------------------------------------


def _as_permute(node: torch.fx.Node) -> bool:
    if fake_tensor(node) is None:
        return False
    node.args, node.target = (node.args[0], axes_of(node)), _aten.permute.default
    return True


def _as_view(node: torch.fx.Node) -> bool:
    node.target = _aten.view.default
    return True


def _as_tensor_overload(node: torch.fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    node.target = node.target.overloadpacket.Tensor  # type: ignore[union-attr]
    return True


def _as_conversion(node: torch.fx.Node) -> bool:
    given = {name: value for name, value in node.kwargs.items() if value is not None}
    if given.keys() != {"dtype"} or len(node.args) != 1 or not isinstance(node.args[0], torch.fx.Node):
        return False
    return _recall(node, CONVERT, (node.args[0], given["dtype"]))


# The largest power of two whose inverse is a normal number too.
_LARGEST_POWER = {torch.float16: 14, torch.bfloat16: 126, torch.float32: 126, torch.float64: 1022}


def _tensor_and_number(node: torch.fx.Node) -> tuple[torch.Tensor, int | float] | None:
    """The fake value of the first operand and the second one, where that is a number other than zero."""
    if len(node.args) != 2 or node.kwargs:
        return None
    value, number = fake_tensor(node.args[0]), node.args[1]
    if value is None or isinstance(number, bool) or not isinstance(number, (int, float)) or number == 0:
        return None
    return value, number


def _as_multiplication(node: torch.fx.Node) -> bool:
    """Divided by, or multiplied with the inverse: one rounding of the same number, if the inverse is exact."""
    operands = _tensor_and_number(node)
    if operands is None or operands[0].dtype not in _LARGEST_POWER:
        return False
    number, largest = operands[1], _LARGEST_POWER[operands[0].dtype]
    if not math.isfinite(number) or abs(math.frexp(number)[0]) != 0.5 or abs(math.frexp(number)[1] - 1) > largest:
        return False
    node.target, node.args = _aten.mul.Tensor, (node.args[0], 1.0 / number)
    return True


def _as_addition(node: torch.fx.Node) -> bool:
    operands = _tensor_and_number(node)
    if operands is None:
        return False  # -0.0 - 0 is -0.0, but -0.0 + 0 is 0.0
    dtype, number = operands[0].dtype, operands[1]
    if dtype in (torch.bool, torch.uint8) or dtype.is_complex:
        return False
    if not dtype.is_floating_point and not -torch.iinfo(dtype).max <= number <= torch.iinfo(dtype).max:
        return False
    node.target, node.args = _aten.add.Tensor, (node.args[0], -number)
    return True


def _without_factor_of_one(node: torch.fx.Node) -> bool:
    alpha = node.kwargs.get("alpha")
    if alpha is None or isinstance(alpha, bool) or alpha != 1:
        return False
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}
    return True


def _with_known_sizes(node: torch.fx.Node) -> bool:
    value, sizes = fake_tensor(node), node.args[1]
    if not isinstance(sizes, (list, tuple)) or not any(isinstance(size, int) and size == -1 for size in sizes):
        return False
    if value is None or is_symbolic(value):
        return False
    node.args = (node.args[0], list(value.shape), *node.args[2:])
    return True


_RULES: dict[object, tuple[Callable[[torch.fx.Node], bool], ...]] = {
    _aten.t.default: (_as_permute,),
    _aten.transpose.int: (_as_permute,),
    _aten._unsafe_view.default: (_as_view, _with_known_sizes),
    _aten.view.default: (_with_known_sizes,),
    _aten.expand.default: (_with_known_sizes,),
    _aten._to_copy.default: (_as_conversion,),
    _aten.add.Scalar: (_as_tensor_overload,),
    _aten.mul.Scalar: (_as_tensor_overload,),
    _aten.sub.Scalar: (_as_tensor_overload, _as_addition),
    _aten.div.Scalar: (_as_tensor_overload, _as_multiplication),
    _aten.add.Tensor: (_without_factor_of_one,),
    _aten.sub.Tensor: (_without_factor_of_one, _as_addition),
    _aten.div.Tensor: (_as_multiplication,),
}

# -- dimensions -------------------------------------------------------------------------------------------------------

# Operators of one tensor whose ``dim`` counts its dimensions; those of lists and those that add a dimension are apart.
_COUNTED = frozenset(
    named_operators("""
        _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all.dim,dims amax amin any.dim,dims
        argmax argmin cumprod cumsum gather index_add index_select max.dim mean.dim min.dim prod.dim_int
        scatter.src,value scatter_add select.int select_scatter slice.Tensor slice_scatter sort split.Tensor
        split_with_sizes squeeze.dim,dims sum.dim_IntList topk unbind.int var.correction var_mean.correction
    """)
)


def _count_from_start(node: torch.fx.Node) -> bool:
    rank = _rank_counted(node)
    if not rank:
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    place = argument_names(node.target).index("dim")
    given = node.args[place] if place < len(node.args) else None
    if isinstance(given, int):
        counted: Any = given % rank
    elif isinstance(given, (list, tuple)) and all(isinstance(dim, int) for dim in given):
        counted, given = [dim % rank for dim in given], list(given)
    else:
        return False
    if counted == given:
        return False
    node.args = (*node.args[:place], counted, *node.args[place + 1 :])
    return True


def _rank_counted(node: torch.fx.Node) -> int | None:
    """The number of dimensions that the ``dim`` of a call counts; None where there is none or it is not known."""
    like: Any = node.args[0] if node.args else None
    if node.target is _aten.cat.default and isinstance(like, (list, tuple)):
        like = _longest(like)
    elif node.target is not _aten.unsqueeze.default and node.target not in _COUNTED:
        return None
    value = fake_tensor(like)
    return None if value is None else value.dim() + (node.target is _aten.unsqueeze.default)


def _longest(pieces: Any) -> Any:
    """The piece that tells the rank: cat takes empty vectors beside tensors of any."""
    known = [piece for piece in pieces if isinstance(piece, torch.fx.Node) and "val" in piece.meta]
    return max(known, key=lambda piece: piece.meta["val"].dim(), default=None)


# -- operands ---------------------------------------------------------------------------------------------------------


def _order_operands(node: torch.fx.Node, written: set[Any]) -> bool:
    """Constants last, and otherwise as it was written first. Operands that decide the strides stay where they are."""
    if len(node.args) != 2 or node.kwargs:
        return False
    left, right = node.args
    if not isinstance(left, torch.fx.Node) or not isinstance(right, torch.fx.Node) or left is right:
        return False
    exchange = _is_constant(left) > _is_constant(right) or (
        _is_constant(left) == _is_constant(right) and (node.target, right, left) in written
    )
    exchanged = exchange and _recall(node, node.target, (right, left))  # type: ignore[arg-type]
    written.add((node.target, *node.args))
    return exchanged


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)
