"""Strides after a change: readers of a value whose strides differ now are given what they can read.

Operators that take any strides (:mod:`torchkiln.graph.operators`) may give others back, so the change is followed
through the graph. All others read a copy with the strides they were given before. So do a view that the new strides do
not allow and the caller of the graph, who was promised the strides of eager.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.graph.fake import (
    computing_with,
    expression,
    fake_mode_of,
    inverse_order,
    is_dense,
    is_packed,
    is_symbolic,
    memory_order,
    metadata_key,
    same_metadata,
    same_sizes,
    same_strides,
    stride_expression,
)
from torchkiln.graph.fake_kernels import fake_kernel
from torchkiln.graph.insertion import inherited
from torchkiln.graph.operators import takes
from torchkiln.graph.size_nodes import SizeNodes
from torchkiln.graph.source import blame

_aten = torch.ops.aten
_STRICT_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
# How many images norms are given first; their first result is laid out as these are, the others know channels only.
_NORMS = {
    _aten._native_batch_norm_legit_no_training.default: 1,
    _aten._native_batch_norm_legit_functional.default: 1,
    _aten.native_batch_norm_backward.default: 2,
}


def propagate_strides(
    graph: torch.fx.Graph, changed: Mapping[torch.fx.Node, Any], results: dict[Hashable, Hashable] | None = None
) -> list[torch.fx.Node]:
    """Recompute the fake values behind nodes that changed and copy where strides must stay; returns the nodes added.

    ``changed`` has the fake value that readers of each node knew before. ``results``, shared by several calls, keeps
    what calls of operators gave, so that the end of a change is not computed anew in every layer of a model: fake
    tensors are most of the time here (130 of 360 ms for 28 layers of attention, and half of that with ``results``).
    """
    mode = fake_mode_of(graph)
    if mode is None:
        return []
    propagation = _Propagation(graph, dict(changed), {} if results is None else results)
    with computing_with(mode):
        propagation.run()
    return propagation.added


class _Propagation:
    """A change on its way through a graph; ``known`` has the values that readers of changed nodes knew before."""

    def __init__(
        self, graph: torch.fx.Graph, known: dict[torch.fx.Node, Any], results: dict[Hashable, Hashable]
    ) -> None:
        self.added: list[torch.fx.Node] = []
        self._graph, self._known, self._results = graph, known, results
        self._waiting: list[torch.fx.Node] = []  # a heap: nodes compare by their place in the graph

    def run(self) -> None:
        for node, before in self._known.items():
            if not same_metadata(before, node.meta.get("val")):
                self._visit_readers(node)
        done: set[torch.fx.Node] = set()
        while self._waiting:
            node = heapq.heappop(self._waiting)
            if node in done or node.op == "output":
                continue
            done.add(node)
            if node.op == "call_function" and not takes(node.target, _values_of((node.args, node.kwargs))):
                self.added += _restride_inputs(node, self._known)
            else:
                self._recompute(node)

    def _visit_readers(self, node: torch.fx.Node) -> None:
        for user in node.users:
            heapq.heappush(self._waiting, user)

    def _recompute(self, node: torch.fx.Node) -> None:
        before, key = node.meta.get("val"), _call_key(node)
        if key is not None and key in self._results and self._results[key] == metadata_key(before):
            return
        count = len(self.added)
        with blame(node):
            value = _recomputed(self._graph, node, self.added)
        if value is None:
            return
        if key is not None and len(self.added) == count:  # otherwise it was another call that gave this
            self._results[key] = metadata_key(value)
        if not same_metadata(before, value):
            self._known.setdefault(node, before)
            node.meta["val"] = value
            self._visit_readers(node)


def _call_key(node: torch.fx.Node) -> Hashable | None:
    """Equal for calls whose results look the same; None where that cannot be told."""
    if node.op != "call_function" or any("val" not in source.meta for source in node.all_input_nodes):
        return None
    key = (node.target, *(metadata_key(_values_of(part)) for part in (node.args, node.kwargs)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _restride_inputs(node: torch.fx.Node, known: Mapping[torch.fx.Node, Any]) -> list[torch.fx.Node]:
    """Give ``node`` copies, strided as before, of those of its inputs that changed; returns the nodes added."""
    added: list[torch.fx.Node] = []
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for source in node.all_input_nodes:
        before = known.get(source)
        if isinstance(before, torch.Tensor) and not same_metadata(before, source.meta.get("val")):
            made = restrided_for(node, source, before)
            added += made
            copies[source] = made[-1]
    node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: copies.get(source, source))
    return added


def restrided_for(reader: torch.fx.Node, source: torch.fx.Node, like: torch.Tensor) -> list[torch.fx.Node]:
    """Nodes that copy ``source`` with the strides of ``like``, right before ``reader`` and in its part of the graph."""
    with reader.graph.inserting_before(reader):
        made = restrided(reader.graph, source, like)
    if "partitioner_tag" in reader.meta:
        for node in made:
            node.meta["partitioner_tag"] = reader.meta["partitioner_tag"]
    return made


def recompute(graph: torch.fx.Graph, node: torch.fx.Node) -> list[torch.fx.Node]:
    """Bring the fake value of ``node`` up to date with its arguments, and what reads it; returns the nodes added."""
    mode = fake_mode_of(graph)
    added: list[torch.fx.Node] = []
    if mode is None or isinstance(node.target, torch._ops.HigherOrderOperator):
        return added
    before = node.meta.get("val")
    with computing_with(mode), blame(node):
        value = _recomputed(graph, node, added)
    if value is None or same_metadata(before, value):
        return added
    node.meta["val"] = value
    return added + propagate_strides(graph, {node: before})


def _recomputed(graph: torch.fx.Graph, node: torch.fx.Node, added: list[torch.fx.Node]) -> Any:
    if node.op != "call_function" or not callable(node.target) or node.meta.get("unbacked_bindings"):
        return None
    if any("val" not in source.meta for source in node.all_input_nodes):
        return None
    followed = _followed(node)
    if followed is not None:
        return followed
    try:
        return _call(node)
    except (RuntimeError, ValueError):
        if node.target not in _STRICT_VIEWS:
            raise
    source = node.args[0]
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    assert isinstance(source, torch.fx.Node)
    with graph.inserting_before(node):
        copy = graph.call_function(_aten.clone.default, (source,), contiguous)
    copy.meta = {**source.meta, "val": source.meta["val"].clone(**contiguous)}
    node.args = (copy, *node.args[1:])
    added.append(copy)
    return _call(node)


def _followed(node: torch.fx.Node) -> Any:
    """The fake value of a call that keeps the layout of its inputs, of symbolic sizes; None where that is not shown.

    Torch asks many questions about such sizes until it has the strides, 30 ms for each batch norm of MobileNetV2.
    """
    before, target = node.meta.get("val"), node.target
    if not isinstance(target, torch._ops.OpOverload) or node.kwargs.get("memory_format") is not None:
        return None
    images = _NORMS.get(target)
    if images is not None and isinstance(before, (tuple, list)):
        old, sources = before[0], list(node.args[:images])
    elif torch.Tag.pointwise in target.tags and not target.is_view:
        old, sources = before, list(node.all_input_nodes)
    else:
        return None
    given = [source.meta["val"] for source in sources if isinstance(source, torch.fx.Node)]
    if not given or not isinstance(old, torch.Tensor) or not is_symbolic(old):
        return None
    if not all(isinstance(value, torch.Tensor) and same_sizes(value, old) for value in given):
        return None
    first = given[0]
    if not is_dense(first) or not all(same_strides(first, value) for value in given[1:]):
        return None
    value = torch.empty_strided(old.shape, first.stride(), dtype=old.dtype, device=old.device)
    return (value, *before[1:]) if isinstance(before, (tuple, list)) else value


def _call(node: torch.fx.Node) -> Any:
    return fake_kernel(node.target)(*_values_of(node.args), **_values_of(node.kwargs))


def _values_of(arguments: Any) -> Any:
    """``arguments`` with fake values in place of nodes, None where a node has none."""
    return torch.fx.map_arg(arguments, lambda source: source.meta.get("val"))


def keep_output_strides(graph: torch.fx.Graph, promised: Sequence[Any]) -> list[torch.fx.Node]:
    """Copy returned tensors whose strides are not those of ``promised``, returned before; gives the nodes added."""
    mode = fake_mode_of(graph)
    if mode is None:
        return []
    output = graph.output_node()
    results = returned_nodes(graph)
    added: list[torch.fx.Node] = []
    for position, (node, before) in enumerate(zip(results, promised, strict=True)):
        if not isinstance(node, torch.fx.Node) or not isinstance(before, torch.Tensor):
            continue
        if same_metadata(node.meta.get("val"), before):
            continue
        with graph.inserting_before(output):
            made = restrided(graph, node, before)
        added += made
        results[position] = made[-1]
    if added:
        returned = results[0] if isinstance(output.args[0], torch.fx.Node) else tuple(results)
        output.args = (returned, *output.args[1:])
    return added


def returned_values(graph: torch.fx.Graph) -> list[Any]:
    """The fake values of what a graph returns, None for constants: what :func:`keep_output_strides` is to keep."""
    return [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in returned_nodes(graph)]


def returned_nodes(graph: torch.fx.Graph) -> list[Any]:
    """What a graph returns, nodes and constants in order; bodies of higher-order operators may return a single node."""
    returned = graph.output_node().args[0]
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def restrided(graph: torch.fx.Graph, node: torch.fx.Node, like: torch.Tensor) -> list[torch.fx.Node]:
    """Nodes, inserted here, that copy ``node`` into memory laid out as that of ``like``; the last is the copy."""
    repeated = [dim for dim, stride in enumerate(like.stride()) if expression(stride) == 0]
    repeated = [dim for dim in repeated if not (type(like.shape[dim]) is int and like.shape[dim] <= 1)]
    if repeated:
        return _restrided_once(graph, node, like, repeated)
    order = memory_order(like)
    if is_packed(like, reversed(order)):
        return _reordered(graph, node, order)
    return _restrided_with_gaps(graph, node, like)


def _reordered(graph: torch.fx.Graph, node: torch.fx.Node, order: Sequence[int]) -> list[torch.fx.Node]:
    """A copy with the dimensions in memory in this order, outermost first.

    Written without sizes, so that it serves symbolic ones: the dimensions in the order of memory, copied row by row,
    and permuted back.
    """
    made = [_made(graph, node, _aten.permute.default, node, list(order))]
    made.append(_made(graph, node, _aten.clone.default, made[-1], memory_format=torch.contiguous_format))
    made.append(_made(graph, node, _aten.permute.default, made[-1], inverse_order(order)))
    return made


def _restrided_once(
    graph: torch.fx.Graph, node: torch.fx.Node, like: torch.Tensor, repeated: Sequence[int]
) -> list[torch.fx.Node]:
    """A copy of one element along each of the dimensions ``repeated``, of stride 0, expanded."""
    made: list[torch.fx.Node] = []
    sizes: list[Any] = [-1] * like.dim()
    for dim in repeated:
        sizes[dim] = like.shape[dim]
        if isinstance(sizes[dim], torch.SymInt):
            made.append(_made(graph, node, _aten.sym_size.int, node, dim))
            sizes[dim] = made[-1]
    first, first_like = node, like
    for dim in repeated:
        first, first_like = _made(graph, node, _aten.slice.Tensor, first, dim, 0, 1), first_like.narrow(dim, 0, 1)
        made.append(first)
    made += restrided(graph, first, first_like)
    made.append(_made(graph, node, _aten.expand.default, made[-1], sizes))
    return made


def _restrided_with_gaps(graph: torch.fx.Graph, node: torch.fx.Node, like: torch.Tensor) -> list[torch.fx.Node]:
    """A copy into memory whose strides are written out: numbers, or nodes that compute them from symbols."""
    sizes: list[Any] = list(like.shape)
    symbolic = [dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)]
    for dim in symbolic:
        sizes[dim] = _made(graph, node, _aten.sym_size.int, node, dim)
    numbers = SizeNodes(node)
    strides = [numbers.argument(stride_expression(stride)) for stride in like.stride()]
    for number in numbers.made:
        number.meta.update(inherited(node))
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    memory = graph.call_function(_aten.empty_strided.default, (sizes, strides), options)
    copy = graph.call_function(_aten.copy.default, (memory, node))
    with computing_with(like.fake_mode) if isinstance(like, FakeTensor) else nullcontext():
        for tensor in (memory, copy):
            tensor.meta = {**inherited(node), "val": torch.empty_strided(like.shape, like.stride(), **options)}
    return [*(sizes[dim] for dim in symbolic), *numbers.made, memory, copy]


def _made(graph: torch.fx.Graph, origin: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call of ``target``, inserted here, with the metadata of ``origin`` and a fake value of its own."""
    made = graph.call_function(target, args, kwargs)
    made.meta = inherited(origin)
    value = origin.meta["val"]
    with computing_with(value.fake_mode) if isinstance(value, FakeTensor) else nullcontext():
        made.meta["val"] = _call(made)
    return made
