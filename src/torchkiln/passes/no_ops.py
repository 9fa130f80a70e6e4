"""Operators of functional graphs that give back the values they were given, in the same layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.fake import same_metadata

_aten = torch.ops.aten

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

# Copy into new memory.
_COPIES = frozenset(
    {_aten.clone.default, _aten._to_copy.default, _aten.lift_fresh_copy.default, _aten.constant_pad_nd.default}
)


def _is_number(value: object, number: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def _adds_zero(node: torch.fx.Node) -> bool:
    # -0.0 + 0 is +0.0, so only integers come back unchanged; the scale must not turn the zero into NaN.
    value = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
    integral = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and not value.dtype.is_complex
    return integral and len(node.args) > 1 and _is_number(node.args[1], 0) and not node.kwargs


def _multiplies_by_one(node: torch.fx.Node) -> bool:
    return len(node.args) > 1 and _is_number(node.args[1], 1) and not node.kwargs


# Arithmetic that returns its first argument, bit for bit, when the second is a number for which this holds.
_NEUTRAL: dict[object, Callable[[torch.fx.Node], bool]] = {
    _aten.add.Tensor: _adds_zero,
    _aten.sub.Tensor: _adds_zero,
    _aten.mul.Tensor: _multiplies_by_one,
    _aten.div.Tensor: _multiplies_by_one,
}


def remove_no_ops(graph_module: torch.fx.GraphModule, *, saves_for_backward: bool) -> bool:
    """Read through every no-op of the graph; returns whether any was found.

    A copy stays where it is the copy that matters: when the memory it copies is written in the graph or when the
    copy leaves the graph. With ``saves_for_backward`` (a joint graph), a copy of memory the user can write between
    forward and backward stays as well, as any value may still become a saved one.
    """
    graph = graph_module.graph
    aliases = Aliases(graph)
    outputs = set(graph.output_node().all_input_nodes)
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function" or node in outputs or not node.args:
            continue
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or not _returns_argument(node, source):
            continue
        if node.target not in _VIEWS:
            root = aliases.root(source)
            if root in aliases.written or aliases.root(node) in aliases.written | aliases.returned:
                continue
            if saves_for_backward and (root.op == "placeholder" or root in aliases.returned):
                continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        changed = True
    return changed


def _returns_argument(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    target = node.target
    known = target in _VIEWS or target in _COPIES
    if not known and (target not in _NEUTRAL or not _NEUTRAL[target](node)):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or not same_metadata(before, after):
        return False
    if target in (_aten.permute.default, _aten.transpose.int, _aten.t.default):
        return _keeps_axes(node, after.dim())  # a square matrix may keep its metadata and still be turned
    if target is _aten.slice.Tensor:
        return _takes_everything(node)
    if target is _aten.constant_pad_nd.default:
        return all(isinstance(width, int) and width == 0 for width in node.args[1])  # type: ignore[union-attr]
    return True


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
    return len(node.args) < 5 or _is_number(node.args[4], 1)
