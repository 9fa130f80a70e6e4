"""Weights of inference: inputs that stay the same from call to call, and what is computed from them alone.

A graph of inference gets parameters and buffers as inputs, marked here. A pass may rewrite the graph so that more is
computed from weights alone: :mod:`torchkiln.partition.hoisting` moves those values into a graph of their own, which
runs when a weight has changed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
import torch.fx

from torchkiln.graph.aliases import memory_root
from torchkiln.graph.effects import has_effect, is_of_users, mutated_arguments, storage_of
from torchkiln.graph.fake import is_symbolic, tensors_of
from torchkiln.graph.operators import Kind, kind_of

WEIGHT = "weight"
"""In the meta of an input: a tensor that stays the same from call to call, which every call checks."""

_STATIC_TYPE = "_dynamo_static_input_type"

UNFOLDED = "unfolded"
"""In the meta of a weight that a layer was refused for: constants are not folded into what is made of it."""

PREPARED = "prepared"
"""In the meta of an input that the graph of weights computes: whether it is packed, for a library to read."""

_mkldnn, _mkl, _onednn = torch.ops.mkldnn, torch.ops.mkl, torch.ops.onednn


def _packing() -> Iterable[tuple[torch._ops.OpOverload, str]]:
    names = (
        (_mkldnn, "_reorder_convolution_weight", "self"),
        (_mkldnn, "_reorder_convolution_transpose_weight", "self"),
        (_mkldnn, "_reorder_linear_weight", "self"),
        (_mkl, "_mkl_reorder_linear_weight", "X"),
        (_onednn, "qconv_prepack", "weight"),
        (_onednn, "qlinear_prepack", "weight"),
    )
    for space, name, weight in names:
        packet = getattr(space, name, None)
        if packet is not None:
            yield packet.default, weight


PACKING: Mapping[torch._ops.OpOverload, str] = MappingProxyType(dict(_packing()))
"""Operators that lay a weight out as a library wants it, and the name of the argument that is the weight.

Their results are opaque: only operators of that library may read them.
"""


def is_marked_static(value: object) -> bool:
    """Whether Dynamo or the user marked a tensor to stay the same from call to call, as parameters do."""
    return bool(getattr(value, _STATIC_TYPE, None))


def is_static(node: torch.fx.Node, value: object) -> bool:
    """Whether an input of a captured graph is so marked: the tensor that Dynamo was given, or the input itself."""
    return bool(node.meta.get("tensor_dict", {}).get(_STATIC_TYPE)) or is_marked_static(value)


def static_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``tensor``, marked as ``other`` is."""
    if is_marked_static(other):
        torch._dynamo.mark_static_address(tensor)
    return tensor


def mark_weights(graph: torch.fx.Graph, positions: Iterable[int], unfolded: Iterable[int] = ()) -> None:
    """Mark the inputs at ``positions`` that the graph only reads, and those that stay ``unfolded``."""
    placeholders = graph.find_nodes(op="placeholder")
    written = {memory_root(argument) for node in graph.nodes for argument in mutated_arguments(node)}
    storages = {storage_of(node.meta.get("val")) for node in written}
    for position in positions:
        node = placeholders[position]
        value = node.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and not any(map(is_symbolic, value.shape))
            and node not in written
            and storage_of(value) not in storages
        ):
            node.meta[WEIGHT] = True
    for position in unfolded:
        placeholders[position].meta[UNFOLDED] = True


def is_weight(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta.get(WEIGHT))


def is_packed_weight(node: torch.fx.Node) -> bool:
    """Whether ``node`` is what one of :data:`PACKING` returned, in this graph or in the one that runs for weights."""
    return node.target in PACKING or bool(node.meta.get(PREPARED))


def given_inputs(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs that a caller gives, without those that the graph of weights computes."""
    return [node for node in graph.find_nodes(op="placeholder") if PREPARED not in node.meta]


def weight_values(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """The nodes whose values depend on weights alone, weights and numbers written in the graph among them."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        computed = node.op == "call_function" and found.issuperset(node.all_input_nodes) and _is_pure(node)
        if computed or is_weight(node):
            found.add(node)
    return frozenset(found)


def is_larger_than_its_weights(node: torch.fx.Node) -> bool:
    """Whether ``node``, which depends on weights alone, has more bytes than they have: int8 made float32, say."""
    return _bytes(node) > sum(map(_bytes, weights_under(node)))


def weights_under(node: torch.fx.Node) -> set[torch.fx.Node]:
    """The weights that ``node`` is computed from."""
    seen, waiting = {node}, [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in seen]
        seen.update(new)
        waiting += new
    return set(filter(is_weight, seen))


def _bytes(node: torch.fx.Node) -> int:
    return sum(value.numel() * value.element_size() for value in tensors_of(node.meta.get("val")))


def _is_pure(node: torch.fx.Node) -> bool:
    """Whether running ``node`` earlier, once for many calls, gives the same value."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or is_of_users(target):
        return False
    if has_effect(node) or kind_of(target) in (Kind.UNINITIALIZED, Kind.RANDOM, Kind.EFFECT):
        return False
    values = tensors_of(node.meta.get("val"))
    return bool(values) and all(v.device.type == "cpu" and not any(map(is_symbolic, v.shape)) for v in values)
