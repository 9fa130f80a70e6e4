"""Operators of functional graphs that give back the values they were given, in the same layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.tangents import is_tangent

_aten = torch.ops.aten
_prims = torch.ops.prims

# Show the same memory: with equal metadata the result can be told from the argument by nothing.
_VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.reshape.default,
        _aten.slice.Tensor,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.transpose.int,
        _aten.t.default,
        _aten.view.default,
        _aten._unsafe_view.default,
    }
)

# Undo themselves.
_INVOLUTIONS = frozenset({_aten.neg.default, _aten.bitwise_not.default})

# Change nothing the second time.
_IDEMPOTENT = frozenset(
    {
        _aten.abs.default,
        _aten.ceil.default,
        _aten.floor.default,
        _aten.relu.default,
        _aten.round.default,
        _aten.sign.default,
        _aten.trunc.default,
    }
)

# Never -0.0, whatever they are given.
_NEVER_NEGATIVE_ZERO = frozenset(
    {_aten.abs.default, _aten.cosh.default, _aten.exp.default, _aten.exp2.default, _aten.sigmoid.default,
     _aten._softmax.default}
)  # fmt: skip


def is_number(value: object, number: float) -> bool:
    """Whether an argument is this number; a truth value is not, and a zero has to have the sign asked for."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != number:
        return False
    return number != 0 or math.copysign(1, value) == math.copysign(1, number)


def keeps_when_zero_is_added(node: torch.fx.Node, zero: float) -> bool:
    """Whether every value of ``node`` plus ``zero`` is that value, bit for bit: -0.0 + 0.0 is 0.0."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype.is_complex:
        return False
    if not value.dtype.is_floating_point or math.copysign(1, zero) < 0:
        return True
    return _is_never_negative_zero(node)


def _is_never_negative_zero(node: torch.fx.Node) -> bool:
    if node.target in _NEVER_NEGATIVE_ZERO:
        return True
    value = node.meta.get("val")
    if node.target not in (_aten.add.Tensor, _aten.add.Scalar) or node.kwargs or not isinstance(value, torch.Tensor):
        return False
    # What cancels is 0.0, and only -0.0 + -0.0 is -0.0. Half types are left out: rounding to them makes -0.0 of small
    # negative numbers, as rounding a number to float32 does.
    number = node.args[1]
    if value.dtype not in (torch.float32, torch.float64) or not isinstance(number, (int, float)):
        return False
    return is_number(number, 0.0) or abs(number) > torch.finfo(torch.float32).tiny


# -- which argument comes back, by operator; None where that depends on values ----------------------------------------


def _first(node: torch.fx.Node) -> Any:
    return node.args[0]


def _copied(node: torch.fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else None


def _unpadded(node: torch.fx.Node) -> Any:
    widths = node.args[1]
    assert isinstance(widths, (list, tuple))
    return node.args[0] if all(isinstance(width, int) and width == 0 for width in widths) else None


def _repeated_once(node: torch.fx.Node) -> Any:
    counts = node.args[1]
    assert isinstance(counts, (list, tuple))
    return node.args[0] if all(isinstance(count, int) and count == 1 for count in counts) else None


def _only_piece(node: torch.fx.Node) -> Any:
    pieces = node.args[0]
    return pieces[0] if isinstance(pieces, (list, tuple)) and len(pieces) == 1 else None


def _either(node: torch.fx.Node) -> Any:
    return node.args[1] if len(node.args) == 3 and node.args[1] is node.args[2] else None


def _stored_whole(node: torch.fx.Node) -> Any:
    """What a store over all of a dimension stores: sizes and step of the source say that nothing else is left."""
    return node.args[1] if len(node.args) < 6 or is_number(node.args[5], 1) else None


def _sum_with_zero(node: torch.fx.Node) -> Any:
    x, number = _operands(node)
    if isinstance(x, torch.fx.Node) and (is_number(number, 0.0) or is_number(number, -0.0)):
        return x if keeps_when_zero_is_added(x, float(number)) else None
    return None


def _difference_with_zero(node: torch.fx.Node) -> Any:
    x, number = _operands(node)
    if isinstance(x, torch.fx.Node) and (is_number(number, 0.0) or is_number(number, -0.0)):
        return x if keeps_when_zero_is_added(x, -float(number)) else None
    return None


def _with_one(node: torch.fx.Node) -> Any:
    x, number = _operands(node)
    return x if is_number(number, 1) else None


def _operands(node: torch.fx.Node) -> tuple[Any, Any]:
    """Both arguments of a binary operator; not where a factor or a rounding is asked for beside them."""
    return (node.args[0], node.args[1]) if len(node.args) == 2 and not node.kwargs else (None, None)


def _undone(node: torch.fx.Node) -> Any:
    inner = node.args[0]
    return inner.args[0] if isinstance(inner, torch.fx.Node) and inner.target is node.target else None


def _done_already(node: torch.fx.Node) -> Any:
    inner = node.args[0]
    same = isinstance(inner, torch.fx.Node) and inner.target is node.target and not node.kwargs
    return inner if same and len(node.args) == 1 else None


# Make new memory and fill it with what is in the argument these give.
_COPIES: dict[object, Callable[[torch.fx.Node], Any]] = {
    _aten.clone.default: _first,
    _aten._to_copy.default: _first,
    _aten.lift_fresh_copy.default: _first,
    _prims.convert_element_type.default: _first,
    _aten.copy.default: _copied,
    _aten.constant_pad_nd.default: _unpadded,
    _aten.repeat.default: _repeated_once,
    _aten.cat.default: _only_piece,
    _aten.where.self: _either,
    _aten.slice_scatter.default: _stored_whole,
    _aten.add.Tensor: _sum_with_zero,
    _aten.add.Scalar: _sum_with_zero,
    _aten.sub.Tensor: _difference_with_zero,
    _aten.sub.Scalar: _difference_with_zero,
    _aten.mul.Tensor: _with_one,
    _aten.mul.Scalar: _with_one,
    _aten.div.Tensor: _with_one,
    _aten.div.Scalar: _with_one,
    _aten.pow.Tensor_Scalar: _with_one,
    **dict.fromkeys(_INVOLUTIONS, _undone),
    **dict.fromkeys(_IDEMPOTENT, _done_already),
}


def remove_no_ops(graph_module: torch.fx.GraphModule, *, saves_for_backward: bool) -> bool:
    """Read through every no-op of the graph; returns whether any was found.

    A copy stays where it is the copy that matters (see :class:`Copies`).
    """
    graph = graph_module.graph
    copies = Copies(graph, saves_for_backward=saves_for_backward)
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        source = _returned_argument(node)
        if source is None:
            continue
        if node in copies.outputs if node.target in _VIEWS else not copies.may_be_read_through(node, source):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        changed = True
    return changed


class Copies:
    """Where the values of one graph, at the time of construction, may be read from the memory they were copied from.

    Not when that memory, or the copy, is written in the graph, nor when the copy leaves the graph. With
    ``saves_for_backward`` (a joint graph), also not from memory the user can write between forward and backward, as
    any value may still become a saved one.
    """

    def __init__(self, graph: torch.fx.Graph, *, saves_for_backward: bool) -> None:
        self.aliases = Aliases(graph)
        self.outputs = frozenset(graph.output_node().all_input_nodes)
        self._saves_for_backward = saves_for_backward
        self._made: set[torch.fx.Node] = set()

    def add(self, node: torch.fx.Node) -> None:
        """Tell of a node made since, with memory of its own."""
        self._made.add(node)

    def may_be_read_through(self, node: torch.fx.Node, source: torch.fx.Node) -> bool:
        """Whether readers of ``node``, memory of its own with the values of ``source``, may read ``source``."""
        aliases = self.aliases
        root = source if source in self._made else aliases.root(source)
        if node in self.outputs or root in aliases.written:
            return False
        if aliases.root(node) in aliases.written or aliases.root(node) in aliases.returned:
            return False
        if aliases.root(node) in aliases.read_as_storage:
            return False
        if not self._saves_for_backward:
            return True
        if root.op == "placeholder":
            return is_tangent(root)  # exist in backward only
        return root not in aliases.returned


def _returned_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument whose values ``node`` gives back in the same layout, if there is one."""
    target = node.target
    if target in _VIEWS:
        source = node.args[0]
    elif target in _COPIES:
        source = _COPIES[target](node)
    else:
        return None
    if not isinstance(source, torch.fx.Node):
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or not same_metadata(before, after):
        return None
    if target in (_aten.permute.default, _aten.transpose.int, _aten.t.default):
        # A square matrix may keep its metadata and still be turned.
        return source if _keeps_axes(node, after.dim()) else None
    if target is _aten.slice.Tensor:
        return source if _takes_everything(node) else None
    return source


def _keeps_axes(node: torch.fx.Node, dims: int) -> bool:
    if node.target is _aten.t.default:
        return dims < 2
    if node.target is _aten.transpose.int:
        first, second = node.args[1:3]
        return isinstance(first, int) and isinstance(second, int) and first % max(dims, 1) == second % max(dims, 1)
    order = node.args[1]
    assert isinstance(order, (list, tuple))
    return all(isinstance(axis, int) and axis % dims == place for place, axis in enumerate(order))


def _takes_everything(node: torch.fx.Node) -> bool:
    # Same size and step 1 means same start: the sizes were compared already.
    return len(node.args) < 5 or is_number(node.args[4], 1)
