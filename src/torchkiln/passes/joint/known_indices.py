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
from torchkiln.graph.nodes import fake_tensor, replace_if_alike
from torchkiln.graph.operators import CASTS, WHOLE_VIEWS
from torchkiln.graph.seeded import RANDINT

_aten = torch.ops.aten

# Take some elements of a vector, or all of them, each once.
_PARTS = frozenset(
    {_aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.flip.default, _aten.slice.Tensor}
)
# Have no elements but those of their argument.
_MOVES = (
    _PARTS
    | WHOLE_VIEWS
    | {
        _aten.expand.default,
        _aten.index.Tensor,
        _aten.repeat.default,
        _aten.select.int,
        _aten._unsafe_index.Tensor,
        _aten._unsafe_view.default,
    }
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
        return _bound_of_found(node, _ORDERS if distinct else _FINDERS)
    bound_of = _DISTINCT.get(node.target) or (None if distinct else _BOUNDED.get(node.target))
    return None if bound_of is None else bound_of(node)


def _length(node: torch.fx.Node) -> Any:
    return node.meta["val"].shape[0]


def _end_of_range(node: torch.fx.Node) -> Any:
    start, end, step = (0, node.args[0], 1) if len(node.args) == 1 else (*node.args, 1)[:3]
    return end if _is_natural(start) and _is_natural(end) and step == 1 else None


_DISTINCT: dict[object, Callable[[torch.fx.Node], Any]] = {
    _aten.randperm.default: _length,
    _aten.randperm.generator: _length,
    _aten.arange.default: _end_of_range,
    _aten.arange.start: _end_of_range,
    _aten.arange.start_step: _end_of_range,
}


def _end_of_interval(low: int, high: int) -> Callable[[torch.fx.Node], Any]:
    """Of random integers, with the places of the limits among the arguments; -1 for a lower limit of zero."""

    def bound(node: torch.fx.Node) -> Any:
        first = 0 if low < 0 else node.args[low]
        return node.args[high] if _is_natural(first) and _is_natural(node.args[high]) else None

    return bound


def _clamped(node: torch.fx.Node) -> Any:
    low, high = (*node.args, None, None)[1:3]
    return high + 1 if _is_natural(low) and _is_natural(high) and low <= high else None  # type: ignore[operator]


def _remainder(node: torch.fx.Node) -> Any:
    divisor = node.args[1]
    return divisor if _is_natural(divisor) and divisor != 0 else None  # has the sign of the divisor


def _best(node: torch.fx.Node) -> Any:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return _size_along(node, dim)


_BOUNDED: dict[object, Callable[[torch.fx.Node], Any]] = {
    _aten.argmax.default: _best,
    _aten.argmin.default: _best,
    _aten.clamp.default: _clamped,
    _aten.randint.default: _end_of_interval(-1, 0),
    _aten.randint.low: _end_of_interval(0, 1),
    _aten.remainder.Scalar: _remainder,
    _aten.remainder.Tensor: _remainder,
    RANDINT: _end_of_interval(2, 3),
}

# Operators whose second result is an index, and where among the arguments the dimension is.
_ORDERS = {_aten.sort.default: 1, _aten.sort.stable: None, _aten.topk.default: 2}
_FINDERS = {**_ORDERS, _aten.max.dim: 1, _aten.min.dim: 1}


def _bound_of_found(node: torch.fx.Node, finders: dict[Any, int | None]) -> Any:
    found, place = node.args
    if not isinstance(found, torch.fx.Node) or found.target not in finders or place != 1:
        return None
    at = finders[found.target]
    return _size_along(
        found, found.args[at] if at is not None and at < len(found.args) else found.kwargs.get("dim", -1)
    )


def _size_along(node: torch.fx.Node, dim: Any) -> Any:
    """The size of a dimension of the first argument; of all of them for None."""
    source: Any = node.args[0]
    shape = source.meta["val"].shape
    if dim is None:
        return math.prod(shape)
    return shape[dim] if shape else 1


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
        index = insert_call(node, torch.ops.prims.convert_element_type.default, index, torch.int64)
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
