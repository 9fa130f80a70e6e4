"""Calls that return their argument: dropout that is off, ``nn.Identity``, ``to`` the same type, views of one shape.

Most of them return the very same tensor, in eager too, and can go whoever reads or writes it. A view to the same shape
is another tensor over the same memory: it goes unless it is returned.
"""

from __future__ import annotations

import operator

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.graph.captured_calls import tensor_of
from torchkiln.graph.captured_memory import Memory, writes_of
from torchkiln.graph.fake import same_metadata

# The functions whose first arguments are (input, p, training) and that hand the input back when they have nothing
# to drop. alpha_dropout and the per-channel ones take the same way out in ATen.
_DROPOUTS = frozenset({F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout})
_TRAINING_DEFAULT = {F.alpha_dropout: False, F.feature_alpha_dropout: False}

# Calls of which fake tensors show whether they returned their argument itself.
_CONVERSIONS = frozenset(
    [
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "short",
        "bool",
        "cpu",
        "contiguous",
        "flatten",
        "reshape",
        "resolve_conj",
        "resolve_neg",
    ]
)
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
        if source is None:
            continue
        node.replace_all_uses_with(source)
        graph_module.graph.erase_node(node)
        changed = True
    return changed


def _returned_argument(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.Node | None:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        first = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        return first if isinstance(module, torch.nn.Identity) and isinstance(first, torch.fx.Node) else None
    if _converts(node):
        first, value = node.args[0] if node.args else None, tensor_of(graph_module, node)
        # Dynamo ran the call on fake tensors: the same object came out as in eager.
        return first if isinstance(first, torch.fx.Node) and value is not None and _is(first, value) else None
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return None
    source = _argument(node, 0, "input", None)
    rate = _argument(node, 1, "p", 0.5)
    training = _argument(node, 2, "training", _TRAINING_DEFAULT.get(node.target, True))
    # A rate outside [0, 1] is an error of the user's that eager reports.
    off = training is False and isinstance(rate, (int, float)) and 0 <= rate <= 1
    off |= node.target is F.dropout and isinstance(rate, (int, float)) and rate == 0
    return source if off and isinstance(source, torch.fx.Node) else None


def _converts(node: torch.fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _CONVERSIONS
    return node.op == "call_function" and node.target in _CONVERTING_FUNCTIONS


def _is(node: torch.fx.Node, value: torch.Tensor) -> bool:
    return node.meta.get("example_value") is value


def _same_view(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node) -> torch.fx.Node | None:
    if node.op == "call_method":
        known = node.target in _VIEW_METHODS
    else:
        known = node.op == "call_function" and node.target in _VIEW_FUNCTIONS
    source = node.args[0] if known and node.args else None
    value, original = tensor_of(graph_module, node), tensor_of(graph_module, source)
    if value is None or original is None or not isinstance(source, torch.fx.Node) or "val" in node.meta:
        return None
    if not same_metadata(value, original) or memory.storages(node) != memory.storages(source):
        return None
    if (
        not _same_offset(value, original)
        or value.is_conj() != original.is_conj()
        or value.is_neg() != original.is_neg()
    ):
        return None
    # Under no_grad a view needs no gradient though its source does; an unknown reader may look at the object itself.
    if not memory.same_region(source, node) or any(not writes_of(user).known for user in node.users):
        return None
    if any(user.op == "output" for user in node.users) or _written_through(node):
        return None
    return source


def _same_offset(left: torch.Tensor, right: torch.Tensor) -> bool:
    first, second = left.storage_offset(), right.storage_offset()
    return type(first) is int and type(second) is int and first == second


def _written_through(node: torch.fx.Node) -> bool:
    """Whether the view itself is given to a call that writes it: eager has rules for views of leaves."""
    return any(node in writes_of(user).arguments for user in node.users)


def _argument(node: torch.fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
