"""Indexing by indices that the graph shows to be in range, or even distinct.

In range are random integers, the indices ``argmax``, ``sort`` and ``topk`` return, remainders, and what is clamped to a
range: a gather by them needs no bounds check. Distinct are permutations (``randperm``, the order ``sort`` and ``topk``
return for a vector, ``arange``) and parts of them: a scatter-add to distinct indices has no collisions, so nothing has
to be atomic or done in order. Where the indices cover the dimension, it is a sum with the terms gathered by the inverse
permutation; otherwise a gather, a sum and a scatter.

On the CPU, where ``index_add`` is a loop over rows, the last form is not used for it: of 2000 rows of 512, 500 took
614 µs with it and 786 µs with gather and scatter; all of 10,000 rows of 256 took 3.7 ms, and 2.6 ms as a sum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import is_row_major, same_metadata
from torchkiln.graph.insertion import SizeArguments, insert_call
from torchkiln.graph.nodes import argument, fake_tensor, replace_if_alike
from torchkiln.graph.operators import CASTS, CONVERT, WHOLE_VIEWS, named_operators
from torchkiln.graph.seeded import RANDINT

_aten = torch.ops.aten

# Take some elements of a vector, or all of them, each once.
_PARTS = frozenset(named_operators("alias clone detach flip slice.Tensor"))
# Have no elements but those of their argument.
_MOVES = frozenset(named_operators("expand index.Tensor repeat select.int _unsafe_index.Tensor _unsafe_view")).union(
    _PARTS, WHOLE_VIEWS
)


def use_known_indices(graph_module: torch.fx.GraphModule) -> bool:
    """Gathers by indices in range lose their bounds check, and scatter-adds to distinct ones need no order."""
    graph = graph_module.graph
    candidates = [node for node in graph.nodes if node.op == "call_function" and node.target in _REWRITES]
    sizes = SizeArguments(graph) if candidates else None
    changed = False
    for node in candidates:
        changed |= replace_if_alike(node, _REWRITES[node.target](node, sizes))
    return changed


# -- what is known of indices -----------------------------------------------------------------------------------------


def index_bound(node: object, *, distinct: bool = False) -> Any:
    """The number that all elements of an integer tensor are below, if none is negative; None when that is not known.

    With ``distinct``, only for a vector whose elements are known to be distinct.
    """
    value = fake_tensor(node)
    if value is None or value.dtype not in (torch.int32, torch.int64) or (distinct and value.dim() != 1):
        return None
    assert isinstance(node, torch.fx.Node)
    if node.target in (_PARTS if distinct else _MOVES):
        return index_bound(node.args[0], distinct=distinct)
    if node.target in CASTS:
        bound = index_bound(node.args[0], distinct=distinct)
        wraps = value.dtype == torch.int32 and not (isinstance(bound, int) and bound <= torch.iinfo(torch.int32).max)
        return None if wraps else bound
    if node.target is operator.getitem:
        found: Any = node.args[0]
        second = node.args[1] == 1 and found.target in (_ORDERS if distinct else _FINDERS)
        return _size_along(found) if second else None
    bound_of = _DISTINCT.get(node.target) or (None if distinct else _BOUNDED.get(node.target))
    return None if bound_of is None else bound_of(node)


def _length(node: torch.fx.Node) -> Any:
    return node.meta["val"].shape[0]


def _end(node: torch.fx.Node) -> Any:
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    return end if _is_natural(start or 0) and _is_natural(end) and step in (None, 1) else None


def _high(node: torch.fx.Node) -> Any:
    high = argument(node, "high")
    return high if _is_natural(argument(node, "low") or 0) and _is_natural(high) else None


def _clamped(node: torch.fx.Node) -> Any:
    low, high = argument(node, "min"), argument(node, "max")
    return high + 1 if _is_natural(low) and _is_natural(high) and low <= high else None


def _remainder(node: torch.fx.Node) -> Any:
    divisor = node.args[1]
    return divisor if _is_natural(divisor) and divisor != 0 else None  # has the sign of the divisor


def _size_along(node: torch.fx.Node) -> Any:
    """The size of the first argument along ``dim``, or the number of its elements without."""
    source: Any = node.args[0]
    shape, dim = source.meta["val"].shape, argument(node, "dim")
    if dim is None:
        return math.prod(shape)
    return shape[dim] if shape else 1


_DISTINCT: dict[object, Callable[[torch.fx.Node], Any]] = {
    **dict.fromkeys(named_operators("randperm.default,generator"), _length),
    **dict.fromkeys(named_operators("arange.default,start,start_step"), _end),
}
_BOUNDED: dict[object, Callable[[torch.fx.Node], Any]] = {
    **dict.fromkeys(named_operators("argmax argmin"), _size_along),
    **dict.fromkeys(named_operators("remainder.Scalar,Tensor"), _remainder),
    **dict.fromkeys([*named_operators("randint.default,low"), RANDINT], _high),
    _aten.clamp.default: _clamped,
}
# Operators whose second result is an index; of the first ones, a permutation of a dimension or a part of one.
_ORDERS = frozenset(named_operators("sort.default,stable topk"))
_FINDERS = _ORDERS.union(named_operators("max.dim min.dim"))


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _in_range(bound: Any, source: object, dim: int) -> bool:
    """Whether numbers below ``bound`` are indices of a dimension. Symbolic sizes are compared as expressions."""
    value = fake_tensor(source)
    if bound is None or value is None or value.dim() == 0:
        return False
    size: Any = value.shape[dim]
    if isinstance(bound, int) and isinstance(size, int):
        return bound <= size
    return same_metadata(bound, size)


# -- rewrites: the new nodes, of which the last stands for the old one; none where it stays ---------------------------


def _index(node: torch.fx.Node, sizes: SizeArguments) -> list[torch.fx.Node]:
    source, indices = node.args
    assert isinstance(indices, (list, tuple))
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not given or not all(_in_range(index_bound(index), source, dim) for dim, index in given):
        return []
    return [insert_call(node, _aten._unsafe_index.Tensor, source, list(indices))]


def _index_select(node: torch.fx.Node, sizes: SizeArguments) -> list[torch.fx.Node]:
    source, dim, index = node.args
    return _gather(node, source, dim, index)


def _embedding(node: torch.fx.Node, sizes: SizeArguments) -> list[torch.fx.Node]:
    weight, index = node.args[:2]
    return _gather(node, weight, 0, index)


def _gather(node: torch.fx.Node, source: Any, dim: Any, index: Any) -> list[torch.fx.Node]:
    if not isinstance(dim, int) or not _in_range(index_bound(index), source, dim):
        return []
    if not is_row_major(index.meta["val"]):
        return []  # eager lays the result of indexing out as the index lies, and that of this operator in rows
    dim %= source.meta["val"].dim()
    return [insert_call(node, _aten._unsafe_index.Tensor, source, [*[None] * dim, index])]


def _index_add(node: torch.fx.Node, sizes: SizeArguments) -> list[torch.fx.Node]:
    target, dim, index, terms = node.args[:4]
    if node.kwargs.get("alpha", 1) != 1 or not isinstance(dim, int):
        return []
    if not _in_range(index_bound(index, distinct=True), target, dim):
        return []
    value = node.meta["val"]
    dim %= value.dim()
    if _is_permutation(index, value, dim):
        return _add_permuted(node, target, dim, index, terms, sizes)
    return [] if value.device.type == "cpu" else _gather_and_scatter(node, target, [*[None] * dim, index], terms)


def _index_put(node: torch.fx.Node, sizes: SizeArguments) -> list[torch.fx.Node]:
    target, indices, terms, accumulate = (*node.args, False)[:4]
    if accumulate is not True or not isinstance(indices, (list, tuple)):
        return []
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    # Of several, it is the combinations that would have to be distinct.
    if len(given) != 1 or not _in_range(index_bound(given[0][1], distinct=True), target, given[0][0]):
        return []
    dim, index = given[0]
    whole = _is_permutation(index, node.meta["val"], dim)
    made = _add_permuted(node, target, dim, index, terms, sizes) if whole else []
    return made or _gather_and_scatter(node, target, list(indices), terms)


def _is_permutation(index: Any, value: torch.Tensor, dim: int) -> bool:
    """Whether distinct indices of a dimension are all there are."""
    return same_metadata(index.meta["val"].shape[0], value.shape[dim])


def _add_permuted(
    node: torch.fx.Node, target: Any, dim: int, index: Any, terms: Any, sizes: SizeArguments
) -> list[torch.fx.Node]:
    value, term = node.meta["val"], terms.meta["val"]
    count = sizes.argument(value.shape[dim], node)
    if count is None or term.dtype != value.dtype or not same_metadata(list(term.shape), list(value.shape)):
        return []
    made: list[torch.fx.Node] = []
    if index.meta["val"].dtype != torch.int64:
        index = insert_call(node, CONVERT, index, torch.int64)
        made.append(index)
    options = {"dtype": torch.int64, "device": value.device, "pin_memory": False}
    made.append(insert_call(node, _aten.arange.start_step, 0, count, 1, **options))
    made.append(insert_call(node, _aten.scatter.src, index, 0, index, made[-1]))  # the inverse permutation
    made.append(insert_call(node, _aten._unsafe_index.Tensor, terms, [*[None] * dim, made[-1]]))
    made.append(insert_call(node, _aten.add.Tensor, target, made[-1]))
    return made


def _gather_and_scatter(node: torch.fx.Node, target: Any, indices: list[Any], terms: Any) -> list[torch.fx.Node]:
    if terms.meta["val"].dtype != target.meta["val"].dtype:
        return []
    there = insert_call(node, _aten._unsafe_index.Tensor, target, indices)
    total = insert_call(node, _aten.add.Tensor, there, terms)
    return [there, total, insert_call(node, _aten.index_put.default, target, indices, total)]


_REWRITES: dict[object, Callable[..., list[torch.fx.Node]]] = {
    _aten.index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.embedding.default: _embedding,
    _aten.index_add.default: _index_add,
    _aten.index_put.default: _index_put,
}
