"""``cat`` and slices that undo each other.

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
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.nodes import argument, calls_of, fake_tensor, replace, rewrite_each

_aten = torch.ops.aten

# As many pieces as lowering concatenates in a loop: for more it calls torch.
_MOST_PIECES = 32


def simplify_slices_of_cat(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    cats = calls_of(graph, _aten.cat.default)
    flattened = rewrite_each(cats, _flatten)
    changed = rewrite_each(cats, _merge_neighbours) or flattened
    if changed:
        update_fake_values(graph_module)
    slices = calls_of(graph, _aten.slice.Tensor) if cats else ()
    return rewrite_each(slices, _read_piece) or changed


def _pieces(node: object) -> tuple[list[torch.fx.Node], int] | None:
    """The operands and the dimension, counted from the first, of a ``cat`` that converts and drops none of them."""
    value = fake_tensor(node)
    if not isinstance(node, torch.fx.Node) or node.target is not _aten.cat.default or value is None or node.kwargs:
        return None
    given, dim = (*node.args, 0)[:2]
    if not isinstance(given, (list, tuple)) or not isinstance(dim, int):
        return None
    pieces = [piece for piece in given if isinstance(piece, torch.fx.Node)]
    values = [fake_tensor(piece) for piece in given]
    # A vector without elements may be concatenated with anything, and other dtypes are converted.
    if any(v is None or v.dim() != value.dim() or v.dtype != value.dtype for v in values):
        return None
    return pieces, dim % value.dim()


def _flatten(node: torch.fx.Node) -> bool:
    """Inline the operands of a ``cat`` that only ``node`` reads."""
    found = _pieces(node)
    if found is None:
        return False
    pieces, dim = found
    flat: list[torch.fx.Node] = []
    for piece in pieces:
        inner = _pieces(piece) if len(piece.users) == 1 else None
        flat += inner[0] if inner is not None and inner[1] == dim and pieces.count(piece) == 1 else [piece]
    if len(flat) == len(pieces) or len(flat) > _MOST_PIECES:
        return False
    node.args = (flat, dim)
    return True


@dataclass(frozen=True)
class _Slice:
    """Elements ``start`` up to ``end`` of ``source`` along the dimension of the ``cat``."""

    source: torch.fx.Node
    start: int
    end: int

    def is_whole(self, dim: int) -> bool:
        return self.start == 0 and bool(self.end == self.source.meta["val"].shape[dim])


def _merge_neighbours(node: torch.fx.Node) -> bool:
    """Replace neighbouring slices of one tensor by one slice."""
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
    with node.graph.inserting_before(node):
        merged = [run[0] if part is None or len(run) == 1 else _slice(node.graph, part, dim) for part, run in runs]
    for new in merged:
        new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
    value = node.meta["val"]
    if len(merged) > 1 or is_symbolic(value) or not value.is_contiguous():
        node.args = (merged, dim)
        return True
    # A copy, as ``cat`` makes one; other passes find out whether it is needed.
    options = {"memory_format": torch.contiguous_format}
    replace(node, insert_known(node, value, _aten.clone.default, merged[0], **options))
    return True


def _as_slice(piece: torch.fx.Node, dim: int) -> _Slice | None:
    """``piece`` as a slice along ``dim``, where it is one or a part of a split."""
    if piece.target is _aten.slice.Tensor:
        return _read_slice(piece, dim)
    whole = piece.args[0] if piece.target is operator.getitem else None
    if not isinstance(whole, torch.fx.Node) or whole.target not in (_aten.split.Tensor, _aten.split_with_sizes.default):
        return None
    source, along, index, values = whole.args[0], argument(whole, "dim"), piece.args[1], whole.meta.get("val")
    if not isinstance(source, torch.fx.Node) or not isinstance(index, int) or not isinstance(values, (list, tuple)):
        return None
    if not isinstance(along, int) or along % source.meta["val"].dim() != dim:
        return None
    lengths = [value.shape[dim] for value in values]
    if not all(isinstance(length, int) for length in lengths):
        return None
    index %= len(lengths)
    return _Slice(source, sum(lengths[:index]), sum(lengths[: index + 1]))


def _read_slice(node: torch.fx.Node, dim: int) -> _Slice | None:
    """A slice with step 1 along ``dim`` whose bounds are numbers."""
    source = node.args[0]
    if not isinstance(source, torch.fx.Node) or node.kwargs:
        return None
    along, start, end, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
    value = source.meta["val"]
    size = value.shape[dim] if dim < value.dim() else None
    if not isinstance(along, int) or along % value.dim() != dim or step != 1 or not isinstance(size, int):
        return None
    if not all(bound is None or isinstance(bound, int) for bound in (start, end)):
        return None
    first, stop, _ = slice(start, end).indices(size)
    return _Slice(source, first, max(first, stop))


def _slice(graph: torch.fx.Graph, part: _Slice, dim: int) -> torch.fx.Node:
    """The slice as a node without a fake value, so that the ``cat`` that reads it is recomputed."""
    if part.is_whole(dim):
        return part.source
    return graph.call_function(_aten.slice.Tensor, (part.source, dim, part.start, part.end))


def _read_piece(node: torch.fx.Node) -> bool:
    """Read a slice of a ``cat`` from the operand it lies in."""
    found = _pieces(node.args[0])
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
            return _read_from(node, wanted.source, _Slice(piece, wanted.start - start, wanted.end - start), dim)
        start += length
    return False


def _read_from(node: torch.fx.Node, cat: torch.fx.Node, part: _Slice, dim: int) -> bool:
    graph = node.graph
    aliases = Aliases(graph)
    if cat in aliases.returned or cat in aliases.written or aliases.root(part.source) in aliases.written:
        return False  # the cat is a copy that someone may tell from what was copied
    piece = part.source
    if not part.is_whole(dim):
        piece = insert_call(node, _aten.slice.Tensor, part.source, dim, part.start, part.end)
    if not same_metadata(piece.meta["val"], node.meta["val"]) and not _readers_agree(graph, node, piece):
        if piece is not part.source:
            graph.erase_node(piece)
        return False
    replace(node, piece)
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
