"""One spelling for operators that can be written in several ways, so that equal computations look equal.

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

Every rewrite is exact, to the sign of a zero, and leaves dtype, sizes and strides as they are. It may as well be run on
the graph of a pattern, for patterns are to be written in any of these ways.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.canonicalize.chains import axes_of
from torchkiln.graph.fake import is_symbolic, same_metadata

_aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default


def canonicalize(graph_module: torch.fx.GraphModule) -> bool:
    """Spell every operator of the graph the canonical way; returns whether any was spelled otherwise."""
    changed = False
    written: dict[Any, torch.fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for rule in _RULES.get(node.target, ()):
            changed |= rule(node)
        changed |= _count_from_start(node)
        if node.target in _COMMUTATIVE:
            changed |= _order_operands(node, written)
    return changed


def _respell(node: torch.fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Make ``node`` this call, if that gives a value that looks the same.

    That is not in question for elementwise operators of one tensor and a number.
    """
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor):
        return False
    if any("val" not in source.meta for source in node.all_input_nodes):
        return False
    given, named = torch.fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    with value.fake_mode, torch.no_grad():
        if not same_metadata(target(*given, **named), value):
            return False
    node.target, node.args, node.kwargs = target, args, kwargs
    return True


def _dtype_of(argument: object) -> torch.dtype | None:
    value = argument.meta.get("val") if isinstance(argument, torch.fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


# -- rules by operator ------------------------------------------------------------------------------------------------


def _as_permute(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    node.args, node.target = (node.args[0], axes_of(node)), _aten.permute.default
    return True


def _as_view(node: torch.fx.Node) -> bool:
    node.target = _aten.view.default
    return True


def _as_tensor_overload(target: torch._ops.OpOverload) -> Callable[[torch.fx.Node], bool]:
    def respell(node: torch.fx.Node) -> bool:
        if len(node.args) != 2 or node.kwargs:
            return False
        node.target = target
        return True

    return respell


def _as_conversion(node: torch.fx.Node) -> bool:
    given = {name: value for name, value in node.kwargs.items() if value is not None}
    if given.keys() != {"dtype"} or len(node.args) != 1 or not isinstance(node.args[0], torch.fx.Node):
        return False
    return _respell(node, _CONVERT, (node.args[0], given["dtype"]), {})


# The largest power of two whose inverse is a normal number too.
_LARGEST_POWER = {torch.float16: 14, torch.bfloat16: 126, torch.float32: 126, torch.float64: 1022}


def _as_product(node: torch.fx.Node) -> bool:
    """Divided by, or multiplied with the inverse: one rounding of the same number, if the inverse is exact."""
    if len(node.args) != 2 or node.kwargs:
        return False
    x, number = node.args
    largest = _LARGEST_POWER.get(_dtype_of(x))  # type: ignore[arg-type]
    if largest is None or isinstance(number, bool) or not isinstance(number, (int, float)) or number == 0:
        return False
    if not math.isfinite(number) or abs(math.frexp(number)[0]) != 0.5 or abs(math.frexp(number)[1] - 1) > largest:
        return False
    node.target, node.args = _aten.mul.Tensor, (x, 1.0 / number)
    return True


def _as_sum(node: torch.fx.Node) -> bool:
    if len(node.args) != 2 or node.kwargs:
        return False
    x, number = node.args
    dtype = _dtype_of(x)
    if dtype is None or isinstance(number, bool) or not isinstance(number, (int, float)) or number == 0:
        return False  # -0.0 - 0 is -0.0, but -0.0 + 0 is 0.0
    if dtype in (torch.bool, torch.uint8) or dtype.is_complex:
        return False
    if not dtype.is_floating_point and not -torch.iinfo(dtype).max <= number <= torch.iinfo(dtype).max:
        return False
    node.target, node.args = _aten.add.Tensor, (x, -number)
    return True


def _without_factor_of_one(node: torch.fx.Node) -> bool:
    alpha = node.kwargs.get("alpha")
    if alpha is None or isinstance(alpha, bool) or alpha != 1:
        return False
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}
    return True


def _with_known_sizes(node: torch.fx.Node) -> bool:
    value, sizes = node.meta.get("val"), node.args[1]
    if not isinstance(sizes, (list, tuple)) or not any(isinstance(size, int) and size == -1 for size in sizes):
        return False
    if not isinstance(value, torch.Tensor) or is_symbolic(value):
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
    _aten.add.Scalar: (_as_tensor_overload(_aten.add.Tensor),),
    _aten.mul.Scalar: (_as_tensor_overload(_aten.mul.Tensor),),
    _aten.sub.Scalar: (_as_tensor_overload(_aten.sub.Tensor), _as_sum),
    _aten.div.Scalar: (_as_tensor_overload(_aten.div.Tensor), _as_product),
    _aten.add.Tensor: (_without_factor_of_one,),
    _aten.sub.Tensor: (_without_factor_of_one, _as_sum),
    _aten.div.Tensor: (_as_product,),
}

# -- dimensions -------------------------------------------------------------------------------------------------------

# Operators of one tensor whose ``dim`` counts its dimensions; those of lists and those that add a dimension are apart.
_COUNTED_NAMES = """
    _log_softmax.default _log_softmax_backward_data.default _softmax.default _softmax_backward_data.default all.dim
    all.dims amax.default amin.default any.dim any.dims argmax.default argmin.default cumprod.default cumsum.default
    gather.default index_add.default index_select.default max.dim mean.dim min.dim prod.dim_int scatter.src
    scatter.value scatter_add.default select.int select_scatter.default slice.Tensor slice_scatter.default
    sort.default split.Tensor split_with_sizes.default squeeze.dim squeeze.dims sum.dim_IntList topk.default
    unbind.int var.correction var_mean.correction
"""
_COUNTED = frozenset(operator.attrgetter(name)(_aten) for name in _COUNTED_NAMES.split())


def _count_from_start(node: torch.fx.Node) -> bool:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    extra = 0
    like: Any = node.args[0] if node.args else None
    if target is _aten.cat.default and isinstance(like, (list, tuple)):
        like = _longest(like)
    elif target is _aten.unsqueeze.default:
        extra = 1
    elif target not in _COUNTED:
        return False
    value = like.meta.get("val") if isinstance(like, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() + extra == 0:
        return False
    rank = value.dim() + extra
    names = [argument.name for argument in target._schema.arguments]
    place = names.index("dim")
    if place >= len(node.args):
        return False
    given = node.args[place]
    if isinstance(given, int):
        counted: Any = given % rank
    elif isinstance(given, (list, tuple)) and all(isinstance(dim, int) for dim in given):
        counted = [dim % rank for dim in given]  # type: ignore[operator]
    else:
        return False
    if counted == (list(given) if isinstance(given, (list, tuple)) else given):
        return False
    node.args = (*node.args[:place], counted, *node.args[place + 1 :])
    return True


def _longest(pieces: Any) -> Any:
    """The piece that tells the rank: an empty vector may join tensors of any."""
    known = [piece for piece in pieces if isinstance(piece, torch.fx.Node) and "val" in piece.meta]
    return max(known, key=lambda piece: piece.meta["val"].dim(), default=None)


# -- operands ---------------------------------------------------------------------------------------------------------

_COMMUTATIVE = frozenset(
    {
        _aten.add.Tensor,
        _aten.mul.Tensor,
        _aten.maximum.default,
        _aten.minimum.default,
        _aten.eq.Tensor,
        _aten.ne.Tensor,
        _aten.bitwise_and.Tensor,
        _aten.bitwise_or.Tensor,
        _aten.bitwise_xor.Tensor,
        _aten.logical_and.default,
        _aten.logical_or.default,
        _aten.logical_xor.default,
    }
)


def _order_operands(node: torch.fx.Node, written: dict[Any, torch.fx.Node]) -> bool:
    """Constants last, and otherwise as it was written first. Operands that decide the strides stay where they are."""
    if len(node.args) != 2 or node.kwargs:
        return False
    left, right = node.args
    if not isinstance(left, torch.fx.Node) or not isinstance(right, torch.fx.Node) or left is right:
        return False
    turned = _is_constant(left) > _is_constant(right) or (
        _is_constant(left) == _is_constant(right) and (node.target, right, left) in written
    )
    swapped = turned and _respell(node, node.target, (right, left), {})  # type: ignore[arg-type]
    written.setdefault((node.target, *node.args), node)
    return swapped


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)
