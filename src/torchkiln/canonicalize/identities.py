"""Calls that return their argument: dropout that is off, ``nn.Identity``, ``to`` the same type, views of one shape.

Most of them return the very same tensor, in eager too, and can go whoever reads or writes it. A view to the same shape
is another tensor over the same memory: it goes unless it is returned.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.graph.captured_calls import operand, tensor_of
from torchkiln.graph.captured_memory import Memory, writes_of
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.nodes import replace

# The functions whose first arguments are (input, p, training) and that hand the input back when they have nothing
# to drop. alpha_dropout and the per-channel ones take the same way out in ATen.
_DROPOUTS = frozenset({F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout})
_OFF_BY_DEFAULT = frozenset({F.alpha_dropout, F.feature_alpha_dropout})

# Calls of which fake tensors show whether they returned their argument itself.
_CONVERSION_NAMES = """
    to type type_as float double half bfloat16 int long short bool cpu contiguous flatten reshape resolve_conj
    resolve_neg
"""
_CONVERSIONS = frozenset(_CONVERSION_NAMES.split())
_CONVERTING_FUNCTIONS = frozenset({torch.flatten, torch.reshape, torch.resolve_conj, torch.resolve_neg})

_VIEW_METHODS = frozenset(["view", "view_as", "expand", "expand_as", "unflatten", "narrow"])
_VIEW_FUNCTIONS = frozenset(
    {torch.permute, torch.transpose, torch.flatten, torch.reshape, torch.squeeze, torch.narrow, operator.getitem}
)


def remove_identities(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    memory = Memory(graph_module)
    for node in list(graph_module.graph.nodes):
        source = _returned_argument(graph_module, node)
        if source is None and memory.steady:
            source = _same_view(graph_module, memory, node)
        if source is not None:
            replace(node, source)
            changed = True
    return changed


def _returned_argument(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.Node | None:
    source = operand(node)
    if node.op == "call_module":
        alone = len(node.args) == 1 and not node.kwargs
        return source if alone and isinstance(graph_module.get_submodule(str(node.target)), torch.nn.Identity) else None
    if _is_one_of(node, _CONVERSIONS, _CONVERTING_FUNCTIONS):
        value = tensor_of(graph_module, node)
        # Dynamo ran the call on fake tensors: the same object came out as in eager.
        same = source is not None and value is not None and source.meta.get("example_value") is value
        return source if same else None
    return _undropped(node) if node.op == "call_function" and node.target in _DROPOUTS else None


def _undropped(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input of a dropout that is off."""
    source = _argument(node, 0, "input", None)
    rate = _argument(node, 1, "p", 0.5)
    training = _argument(node, 2, "training", node.target not in _OFF_BY_DEFAULT)
    if not isinstance(source, torch.fx.Node) or not isinstance(rate, (int, float)):
        return None
    # A rate outside [0, 1] is an error of the user's that eager reports.
    off = (training is False and 0 <= rate <= 1) or (node.target is F.dropout and rate == 0)
    return source if off else None


def _is_one_of(node: torch.fx.Node, methods: Collection[str], functions: Collection[Any]) -> bool:
    if node.op == "call_method":
        return node.target in methods
    return node.op == "call_function" and node.target in functions


def _same_view(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node) -> torch.fx.Node | None:
    source = operand(node) if _is_one_of(node, _VIEW_METHODS, _VIEW_FUNCTIONS) else None
    value, original = tensor_of(graph_module, node), tensor_of(graph_module, source)
    if source is None or value is None or original is None or "val" in node.meta:
        return None
    if memory.storages(node) != memory.storages(source) or not _same_elements(value, original):
        return None
    # Under no_grad a view needs no gradient though its source does. An unknown reader may look at the object itself,
    # the caller too, and eager has rules for writing to views of leaves.
    if not memory.same_region(source, node) or any(user.op == "output" for user in node.users):
        return None
    readers = [writes_of(user) for user in node.users]
    return source if all(reader.known and node not in reader.arguments for reader in readers) else None


def _same_elements(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one storage show the same of it."""
    first, second = left.storage_offset(), right.storage_offset()
    same_offset = type(first) is int and type(second) is int and first == second
    same_lazy_bits = left.is_conj() == right.is_conj() and left.is_neg() == right.is_neg()
    return same_offset and same_lazy_bits and same_metadata(left, right)


def _argument(node: torch.fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
