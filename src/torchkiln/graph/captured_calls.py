"""Calls of captured graphs: reading their values and arguments, and adding new ones with fake values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from typing_extensions import TypeIs

from torchkiln.graph.fake import attribute_of, fake_mode_of, value_key


def value_of(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    """The fake value of ``node``, or the attribute it reads; None when it has none."""
    for key in ("example_value", "val"):
        if key in node.meta:
            return node.meta[key]
    return attribute_of(graph_module, str(node.target)) if node.op == "get_attr" else None


def tensor_of(graph_module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The fake value of ``node`` where that is one strided tensor."""
    if not isinstance(node, torch.fx.Node):
        return None
    value = value_of(graph_module, node)
    return value if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def is_call(node: Any, target: Any) -> TypeIs[torch.fx.Node]:
    """Whether ``node`` is a call of the function ``target``."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target is target


def operand(node: torch.fx.Node, position: int = 0) -> torch.fx.Node | None:
    """The argument at that position where it is a node."""
    value = node.args[position] if position < len(node.args) else None
    return value if isinstance(value, torch.fx.Node) else None


def concatenated(node: Any, target: Any) -> tuple[list[torch.fx.Node], int] | None:
    """The tensors and the dimension of ``target``, cat or stack, where ``node`` is a call of it as normalized."""
    if not is_call(node, target) or len(node.args) != 1:
        return None
    parts, dim = node.args[0], node.kwargs.get("dim")
    if not isinstance(parts, (list, tuple)) or type(dim) is not int or dim < 0:
        return None
    nodes = [part for part in parts if isinstance(part, torch.fx.Node)]
    return (nodes, dim) if nodes and len(nodes) == len(parts) else None


def add_call(
    before: torch.fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> torch.fx.Node:
    """A call of ``target`` right before the node ``before``, from whose line it is said to come, with a fake value."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, dict(kwargs or {}))
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in before.meta:
            node.meta[key] = before.meta[key]
    mode, module = fake_mode_of(graph), graph.owning_module
    if mode is not None and isinstance(module, torch.fx.GraphModule):

        def fake(source: torch.fx.Node) -> Any:
            value = value_of(module, source)
            real = isinstance(value, torch.Tensor) and source.op == "get_attr"
            return mode.from_tensor(value, static_shapes=True) if real else value

        values, named = torch.fx.map_arg((node.args, node.kwargs), fake)
        with mode, torch.no_grad():
            node.meta[value_key(graph)] = target(*values, **named)
    return node
