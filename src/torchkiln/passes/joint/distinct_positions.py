"""Indexing by positions that are known to be distinct and in range: permutations, and parts of them.

Such are ``randperm``, the order ``sort`` and ``topk`` find for a vector, and ``arange``. A gather by them needs no
check of its positions. Sums into places that are all different are a gather, a sum and a store: no two of them meet,
so nothing has to be atomic or done in order.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import same_metadata
from torchkiln.graph.insertion import erase_made, insert_call

_aten = torch.ops.aten

# Take some elements of a vector, or all of them, each once; or convert them.
_PARTS = frozenset(
    {
        _aten.alias.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.flip.default,
        _aten.slice.Tensor,
        _aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)
_RANDPERM = frozenset({_aten.randperm.default, _aten.randperm.generator})
_ORDERS = frozenset({_aten.sort.default, _aten.sort.stable, _aten.topk.default})


def use_distinct_positions(graph_module: torch.fx.GraphModule) -> bool:
    """Gathers by distinct positions lose their check, and sums into distinct places become stores."""
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is None:
            continue
        made = rewrite(node)
        if not made:
            continue
        if same_metadata(made[-1].meta.get("val"), node.meta.get("val")):
            node.replace_all_uses_with(made[-1])
            graph.erase_node(node)
            changed = True
        else:
            erase_made(made)
    return changed


def bound_of_distinct(node: object) -> Any:
    """The number that all elements of a vector are below, if they are distinct and not negative; otherwise None."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    if not isinstance(node, torch.fx.Node) or not isinstance(value, torch.Tensor) or value.dim() != 1:
        return None
    if value.dtype not in (torch.int32, torch.int64) or node.op != "call_function":
        return None
    if node.target in _RANDPERM:
        return value.shape[0]
    if node.target in _PARTS:
        bound = bound_of_distinct(node.args[0])
        wraps = value.dtype == torch.int32 and not (isinstance(bound, int) and bound <= torch.iinfo(torch.int32).max)
        return None if wraps else bound
    if node.target in (_aten.arange.start, _aten.arange.start_step):
        start, end, step = (*node.args, 1)[:3]
        return end if _is_natural(start) and _is_natural(end) and step == 1 else None
    if node.target is _aten.arange.default:
        return node.args[0] if _is_natural(node.args[0]) else None
    if node.target is operator.getitem:
        found, place = node.args
        is_order = isinstance(found, torch.fx.Node) and found.target in _ORDERS and place == 1
        return found.args[0].meta["val"].shape[0] if is_order else None  # type: ignore[union-attr]
    return None


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_in(positions: object, source: object, dim: int) -> bool:
    """Whether ``positions`` are distinct ones of a dimension of ``source``. Symbolic sizes are compared as such."""
    bound = bound_of_distinct(positions)
    value = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if bound is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return False
    size: Any = value.shape[dim]
    if isinstance(bound, int) and isinstance(size, int):
        return bound <= size
    return same_metadata(bound, size)


# -- rewrites: the new nodes, of which the last stands for the old one; none where it stays ---------------------------


def _index(node: torch.fx.Node) -> list[torch.fx.Node]:
    source, positions = node.args
    assert isinstance(positions, (list, tuple))
    given = [(dim, position) for dim, position in enumerate(positions) if position is not None]
    if not given or not all(_are_in(position, source, dim) for dim, position in given):
        return []
    return [insert_call(node, _aten._unsafe_index.Tensor, source, list(positions))]


def _index_select(node: torch.fx.Node) -> list[torch.fx.Node]:
    source, dim, positions = node.args
    return _gather(node, source, dim, positions)


def _embedding(node: torch.fx.Node) -> list[torch.fx.Node]:
    weight, positions = node.args[:2]
    return _gather(node, weight, 0, positions)


def _gather(node: torch.fx.Node, source: Any, dim: Any, positions: Any) -> list[torch.fx.Node]:
    if not isinstance(dim, int) or not _are_in(positions, source, dim):
        return []
    dim %= source.meta["val"].dim()
    return [insert_call(node, _aten._unsafe_index.Tensor, source, [*[None] * dim, positions])]


def _index_add(node: torch.fx.Node) -> list[torch.fx.Node]:
    target, dim, positions, terms = node.args[:4]
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(dim, int) or not _are_in(positions, target, dim):
        return []
    dim %= target.meta["val"].dim()  # type: ignore[union-attr]
    return _sum_into(node, target, [*[None] * dim, positions], terms)


def _index_put(node: torch.fx.Node) -> list[torch.fx.Node]:
    target, positions, terms, accumulate = (*node.args, False)[:4]
    if accumulate is not True or not isinstance(positions, (list, tuple)):
        return []
    given = [(dim, position) for dim, position in enumerate(positions) if position is not None]
    # Of several, it is the combinations that would have to be distinct.
    if len(given) != 1 or not _are_in(given[0][1], target, given[0][0]):
        return []
    return _sum_into(node, target, list(positions), terms)


def _sum_into(node: torch.fx.Node, target: Any, positions: list[Any], terms: Any) -> list[torch.fx.Node]:
    if terms.meta["val"].dtype != target.meta["val"].dtype:
        return []
    there = insert_call(node, _aten._unsafe_index.Tensor, target, positions)
    total = insert_call(node, _aten.add.Tensor, there, terms)
    return [there, total, insert_call(node, _aten.index_put.default, target, positions, total)]


_REWRITES = {
    _aten.index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.embedding.default: _embedding,
    _aten.index_add.default: _index_add,
    _aten.index_put.default: _index_put,
}
