"""What follows a call of oneDNN with a packed weight becomes part of the call, where that was measured to pay.

The library may add another tensor to its result, subtract or multiply it, and apply an activation, before it stores
anything. Three families of rewrites, in this order: both of these, the first alone, an activation alone.

Nothing is gained where only kernels of ours read the activation: they compute it on the way. Nor where the other tensor
is not in memory anyway: it would have to be stored for the call. Everywhere else, ``fusion_times.csv`` decides, which
``make bench-fusions`` writes.

oneDNN's relu, clamp and hardsigmoid give 0, a bound or 1 for NaN, where torch gives NaN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import is_channels_last, is_row_major, same_metadata, same_sizes
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.operators import WHOLE_VIEWS, becomes_loop
from torchkiln.passes.freezing.onednn.activations import Activation, Fused, activations
from torchkiln.passes.freezing.onednn.calls import NOT_FUSED, OPERATORS, PackedCall, packed_call, packed_calls
from torchkiln.passes.freezing.onednn.fusion_times import measured_on, pays
from torchkiln.patterns.expressions import Call, Capture
from torchkiln.patterns.match import Match
from torchkiln.patterns.rewrites import DirectRewrite, RewriteSet
from torchkiln.target import Target

_aten = torch.ops.aten
_BINARY = {_aten.add.Tensor: "add", _aten.sub.Tensor: "sub", _aten.mul.Tensor: "mul"}
AFTER_BINARY = frozenset({"relu", "hardtanh"})
"""Activations among whose forms is the one that torch has for a second tensor: relu."""

_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})


def fuse_into_calls(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    if not packed_calls(graph_module.graph):
        return False
    return fusions(measured_on(target)).apply(graph_module)


@cache
def fusions(processor: str) -> RewriteSet:
    """The rewrites, with what was measured on ``processor``."""
    found = RewriteSet("onednn")
    for activation in activations():
        if activation.name not in AFTER_BINARY:
            continue
        name = f"onednn/binary and {activation.name}"
        found.add(_rewrite(name, processor, activation.pattern(_binary()), activation, binary=True, priority=0))
    found.add(_rewrite("onednn/binary", processor, _binary(), None, binary=True, priority=1))
    for activation in activations():
        value = Capture("value", exclusive=True)
        found.add(_rewrite(f"onednn/{activation.name}", processor, activation.pattern(value), activation, priority=2))
    return found


def _binary() -> Call:
    return Call(list(_BINARY), Capture("value", exclusive=True), Capture("other"))


def _rewrite(
    name: str, processor: str, pattern: Call, activation: Activation | None, *, priority: int, binary: bool = False
) -> DirectRewrite:
    def check(match: Match) -> bool:
        call = _call_under(match.captures["value"])
        if call is None:
            return match.decline("what it reads is no call of oneDNN with a packed weight")
        reason = _in_the_way(match, call, activation, processor, binary=binary)
        if reason:
            call.node.meta[NOT_FUSED] = reason
            return match.decline(reason)
        return True

    def fuse(match: Match, **_captures: Any) -> None:
        call = _call_under(match.captures["value"])
        assert call is not None
        unary = activation.fused(match.captures) if activation is not None else None
        call.node.meta.pop(NOT_FUSED, None)
        if binary:
            _fuse_binary(match, call, unary)
        else:
            assert unary is not None
            _fuse_unary(match, call, unary)

    return DirectRewrite(name, pattern, fuse, when=check, priority=priority)


def _call_under(value: Any) -> PackedCall | None:
    """The call whose result ``value`` shows all of, itself or through views that nothing else reads."""
    while isinstance(value, torch.fx.Node) and value.target in WHOLE_VIEWS:
        (value,) = value.all_input_nodes[:1]
        if len(value.users) > 1:
            return None
    return packed_call(value)


def _in_the_way(
    match: Match, call: PackedCall, activation: Activation | None, processor: str, *, binary: bool
) -> str | None:
    """Why a match is not fused into its call; None where it is."""
    value, result = match.captures["value"], match.output
    if call.fused:
        return f"{call.fused[-1]} is fused already"
    unary = activation.fused(match.captures) if activation is not None else None
    if activation is not None and (unary is None or (binary and unary.attribute != "relu")):
        return f"the library has no {activation.name} of these numbers" + (" and a second tensor" if binary else "")
    if not same_metadata(value.meta.get("val"), result.meta.get("val")):
        return f"{result.name} has another dtype, size or layout"
    if binary and (reason := _other_in_the_way(match, call, activation)):
        return reason
    readers = _readers(result)
    if readers and all(map(becomes_loop, readers)):
        return f"kernels compute {result.name} where they read it"
    name = "" if activation is None else "relu" if unary == Fused("relu") else activation.name
    fused = "_".join(filter(None, (_name_of_binary(match) if binary else "", name)))
    if not pays(processor, call.kind, call.node.meta["val"].dtype, fused):
        return f"{fused} was measured to take as long in the call"
    return None


def _other_in_the_way(match: Match, call: PackedCall, activation: Activation | None) -> str | None:
    other, value = match.captures["other"], match.captures["value"]
    known = other.meta.get("val") if isinstance(other, torch.fx.Node) else None
    if not isinstance(known, torch.Tensor) or not same_sizes(known, value.meta["val"]):
        return "the other operand has other sizes"
    if known.dtype != value.meta["val"].dtype:
        return "the other operand has another dtype"
    if call.kind == "transposed convolution" or (call.kind == "linear" and activation is not None):
        return f"the library has no {call.kind} with a second tensor" + (" and an activation" if activation else "")
    if _first_operand(match) is not value and _name_of_binary(match) == "sub":
        return "it is subtracted"
    if value is not call.node:
        if call.kind != "linear" or not _only_reshapes(value, call.node) or not is_row_major(known):
            return "views lie between the call and the other operand"
    elif not (is_row_major(known) if call.kind == "linear" else is_channels_last(known)):
        return "the other operand has another layout"
    if not _is_in_memory(other, match):
        return f"{other.name} is computed by the kernel that would read the call"
    return None


def _binary_node(match: Match) -> torch.fx.Node:
    (found,) = (node for node in match.nodes if match.captures["value"] in node.args and node.target in _BINARY)
    return found


def _first_operand(match: Match) -> Any:
    return _binary_node(match).args[0]


def _name_of_binary(match: Match) -> str:
    return _BINARY[_binary_node(match).target]  # type: ignore[index]


def _only_reshapes(value: torch.fx.Node, call: torch.fx.Node) -> bool:
    while value is not call:
        if value.target not in _RESHAPES:
            return False
        (value,) = value.all_input_nodes[:1]
    return True


def _is_in_memory(other: torch.fx.Node, match: Match) -> bool:
    """Whether a tensor is stored whatever is fused: an input, what an operator returns, or what one reads."""
    root = other
    while (source := view_source(root)) is not None:
        root = source
    if root.op != "call_function" or not becomes_loop(root):
        return True
    return any(not becomes_loop(reader) for reader in _readers(root) if reader not in match.nodes)


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The readers of ``node`` and of views of it."""
    found: list[torch.fx.Node] = []
    for user in node.users:
        found += [user] if view_source(user) is None else _readers(user)
    return found


def _fuse_unary(match: Match, call: PackedCall, unary: Fused) -> None:
    node = call.node
    node.args = (*node.args[:-3], unary.attribute, list(unary.scalars), unary.algorithm)
    match.index.forget([node, *match.output.users])
    match.output.replace_all_uses_with(match.captures["value"])
    match.erase_nodes()


def _fuse_binary(match: Match, call: PackedCall, unary: Fused | None) -> None:
    result, value, other = match.output, match.captures["value"], match.captures["other"]
    binary = _name_of_binary(match)
    known, made = call.node.meta["val"], []
    if value is not call.node:
        other = insert_call(result, _aten.view.default, other, [-1, known.shape[1]])
        made.append(other)
    if call.kind == "linear":
        arguments: tuple[Any, ...] = (call.x, other, call.weight, call.bias, binary)
        made.append(insert_known(result, known, OPERATORS.linear_binary, *arguments))
    else:
        then = (unary.attribute, list(unary.scalars), unary.algorithm) if unary is not None else (None, [], None)
        arguments = (call.x, other, call.weight, call.bias, *call.geometry, binary, None, *then)
        made.append(insert_known(result, known, OPERATORS.convolution_binary, *arguments))
    if value is not call.node:
        made.append(_reshaped(result, made[-1], value, call.node))
    for node in made:
        match.index.add(node)
    match.index.forget(result.users)
    result.replace_all_uses_with(made[-1])
    match.erase_nodes()
    while value is not call.node:
        outer, (value,) = value, value.all_input_nodes[:1]
        value.graph.erase_node(outer)
    value.graph.erase_node(call.node)


def _reshaped(before: torch.fx.Node, made: torch.fx.Node, value: torch.fx.Node, call: torch.fx.Node) -> torch.fx.Node:
    """``made`` in the form that ``value`` has of ``call``."""
    sizes = value.args[1]
    return insert_known(before, value.meta["val"], _aten.view.default, made, sizes)


