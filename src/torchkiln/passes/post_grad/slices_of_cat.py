"""Joining what was taken apart, and taking apart what was joined: ``cat`` and slices that undo each other.

``cat`` of neighbouring slices of one tensor is a slice of it, a slice that lies within one piece of a ``cat`` is a
slice of that piece, and a ``cat`` of a ``cat`` along the same dimension is one ``cat``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.fake import fake_mode_of, is_symbolic, same_metadata, update_fake_values

_aten = torch.ops.aten

# As many pieces as lowering joins in a loop: more are joined by torch.
_MOST_PIECES = 32


def simplify_joined_slices(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    joins = graph.find_nodes(op="call_function", target=_aten.cat.default)
    if not joins:
        return False
    changed = False
    for node in joins:
        changed |= _flatten(node)
    for node in joins:
        changed |= _join_neighbours(graph, node)
    if changed:
        update_fake_values(graph_module)
    for node in graph.find_nodes(op="call_function", target=_aten.slice.Tensor):
        changed |= _read_piece(graph_module, node)
    return changed


def _pieces(node: torch.fx.Node) -> tuple[list[torch.fx.Node], int] | None:
    """The tensors that a ``cat`` joins and the dimension, counted from the first; None where it is an odd one."""
    given, value = node.args[0], node.meta.get("val")
    if not isinstance(given, (list, tuple)) or not isinstance(value, torch.Tensor) or node.kwargs:
        return None
    pieces = [piece for piece in given if isinstance(piece, torch.fx.Node)]
    dim = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(dim, int) or len(pieces) != len(given):
        return None
    values = [piece.meta.get("val") for piece in pieces]
    # A vector without elements may be joined to anything, and other dtypes are converted.
    if not all(isinstance(v, torch.Tensor) and v.dim() == value.dim() and v.dtype == value.dtype for v in values):
        return None
    return pieces, dim % value.dim()


def _flatten(node: torch.fx.Node) -> bool:
    """Take the pieces of a joined tensor that nobody else reads."""
    found = _pieces(node)
    if found is None:
        return False
    pieces, dim = found
    flat: list[torch.fx.Node] = []
    for piece in pieces:
        inner = _pieces(piece) if piece.target is _aten.cat.default and len(piece.users) == 1 else None
        flat += inner[0] if inner is not None and inner[1] == dim and pieces.count(piece) == 1 else [piece]
    if len(flat) == len(pieces) or len(flat) > _MOST_PIECES:
        return False
    node.args = (flat, dim)
    return True


@dataclass(frozen=True)
class _Slice:
    """Elements ``start`` up to ``end`` of ``source`` along the dimension that is joined."""

    source: torch.fx.Node
    start: int
    end: int


def _join_neighbours(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    found = _pieces(node)
    if found is None:
        return False
    pieces, dim = found
    runs: list[tuple[_Slice | None, list[torch.fx.Node]]] = []
    for piece in pieces:
        here = _as_slice(piece, dim)
        before = runs[-1][0] if runs else None
        if here is not None and before is not None and before.source is here.source and before.end == here.start:
            runs[-1] = (_Slice(here.source, before.start, here.end), [*runs[-1][1], piece])
        else:
            runs.append((here, [piece]))
    if len(runs) == len(pieces):
        return False
    with graph.inserting_before(node):
        joined = [run[0] if part is None or len(run) == 1 else _slice(graph, part, dim) for part, run in runs]
    for new in joined:
        new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
    if len(joined) > 1 or is_symbolic(node.meta["val"]) or not node.meta["val"].is_contiguous():
        node.args = (joined, dim)
        return True
    # As ``cat`` does, it gives a tensor of its own; whether that is needed is for others to find out.
    with graph.inserting_before(node):
        copy = graph.call_function(_aten.clone.default, (joined[0],), {"memory_format": torch.contiguous_format})
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy)
    graph.erase_node(node)
    return True


def _as_slice(piece: torch.fx.Node, dim: int) -> _Slice | None:
    if piece.target is _aten.slice.Tensor:
        return _read_slice(piece, dim)
    whole = piece.args[0] if piece.target is operator.getitem else None
    if not isinstance(whole, torch.fx.Node) or not whole.args or not isinstance(whole.args[0], torch.fx.Node):
        return None
    index = piece.args[1]
    if whole.target in (_aten.split.Tensor, _aten.split_with_sizes.default) and isinstance(index, int):
        along = whole.args[2] if len(whole.args) > 2 else whole.kwargs.get("dim", 0)
        values = whole.meta.get("val")
        rank = whole.args[0].meta["val"].dim()
        if not isinstance(along, int) or along % rank != dim or not isinstance(values, (list, tuple)):
            return None
        lengths = [v.shape[dim] for v in values]
        if all(isinstance(length, int) for length in lengths):
            index %= len(lengths)
            return _Slice(whole.args[0], sum(lengths[:index]), sum(lengths[: index + 1]))
    return None


def _read_slice(node: torch.fx.Node, dim: int) -> _Slice | None:
    """A slice with step 1 along ``dim`` whose bounds are numbers."""
    source = node.args[0]
    if not isinstance(source, torch.fx.Node) or node.kwargs:
        return None
    given: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    along, start, end, step = given
    value = source.meta["val"]
    size = value.shape[dim] if dim < value.dim() else None
    if not isinstance(along, int) or along % value.dim() != dim or step != 1 or not isinstance(size, int):
        return None
    if not all(bound is None or isinstance(bound, int) for bound in (start, end)):
        return None
    first, stop, _ = slice(start, end).indices(size)
    return _Slice(source, first, max(first, stop))


def _slice(graph: torch.fx.Graph, part: _Slice, dim: int) -> torch.fx.Node:
    if part.start == 0 and part.end == part.source.meta["val"].shape[dim]:
        return part.source
    return graph.call_function(_aten.slice.Tensor, (part.source, dim, part.start, part.end))


def _read_piece(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Take a slice of a joined tensor from the piece it lies in."""
    joined = node.args[0]
    found = _pieces(joined) if isinstance(joined, torch.fx.Node) and joined.target is _aten.cat.default else None
    if found is None or is_symbolic(node.meta.get("val")):
        return False
    pieces, dim = found
    wanted = _read_slice(node, dim)
    if wanted is None or wanted.end <= wanted.start:
        return False
    start = 0
    for piece in pieces:
        length = piece.meta["val"].shape[dim]
        if not isinstance(length, int):
            return False
        if start <= wanted.start and wanted.end <= start + length:
            return _take(graph_module, node, joined, _Slice(piece, wanted.start - start, wanted.end - start), dim)
        start += length
    return False


def _take(graph_module: torch.fx.GraphModule, node: torch.fx.Node, joined: Any, part: _Slice, dim: int) -> bool:
    graph = graph_module.graph
    aliases = Aliases(graph)
    if joined in aliases.returned or joined in aliases.written or aliases.root(part.source) in aliases.written:
        return False  # the joined tensor is a copy that someone may tell from what was copied
    with graph.inserting_before(node):
        piece = _slice(graph, part, dim)
    if piece is not part.source:
        piece.meta["stack_trace"] = node.meta.get("stack_trace")
        update_fake_values(graph_module)
    if not same_metadata(piece.meta["val"], node.meta["val"]) and not _readers_agree(graph, node, piece):
        if piece is not part.source:
            graph.erase_node(piece)
        return False
    node.replace_all_uses_with(piece)
    graph.erase_node(node)
    return True


def _readers_agree(graph: torch.fx.Graph, node: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Whether all that reads ``node`` gives results of the same strides when it reads ``other``."""
    mode = fake_mode_of(graph)
    assert mode is not None
    for user in node.users:
        known = user.meta.get("val")
        if user.op != "call_function" or not isinstance(known, torch.Tensor) or not callable(user.target):
            return False

        def value_of(source: torch.fx.Node, node: torch.fx.Node = node) -> Any:
            return (other if source is node else source).meta.get("val")

        args, kwargs = torch.fx.map_arg((user.args, user.kwargs), value_of)
        if isinstance(user.target, torch._ops.OpOverload) and user.target.is_view:
            return False  # its readers would have to be asked too
        with mode, torch.no_grad():
            if not same_metadata(user.target(*args, **kwargs), known):
                return False
    return True
