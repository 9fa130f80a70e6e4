"""Storages of inputs that are resized after the graph has written to them.

Making a graph functional turns a write into a new value, and the resize that follows it into one of that value: the
input itself would keep the size it had before. Such a graph is not compiled, and run eagerly it does what it says.
FSDP fills freed parameters by an operator with a functional form of its own, which stays a write to the input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.errors import UnsupportedError
from torchkiln.graph.captured_memory import writes_of
from torchkiln.graph.effects import is_written, resizes_storage, storage_of
from torchkiln.graph.source import blame


def reject_resizes_after_writes(graph_module: torch.fx.GraphModule) -> None:
    """Raise UnsupportedError, naming the node, where a captured graph resizes the storage of an input it wrote to."""
    nodes = graph_module.graph.nodes
    if not any(resizes_storage(_overload(node.target)) for node in nodes):
        return
    inputs = {_storage(node) for node in nodes if node.op == "placeholder"} - {None}
    written: set[int | None] = set()
    for node in nodes:
        operator = _overload(node.target)
        if not resizes_storage(operator):
            written |= {_storage(argument) for argument in _written(node, operator)}
        elif _storage(node.all_input_nodes[0]) in written & inputs:
            with blame(node):
                raise UnsupportedError("a resize of an input's storage after a write into it")


def _overload(target: Any) -> Any:
    """The operator itself where ``target`` is all the forms of one that has a single form."""
    if isinstance(target, torch._ops.OpOverloadPacket) and len(target.overloads()) == 1:
        return getattr(target, target.overloads()[0])
    return target


def _written(node: torch.fx.Node, operator: Any) -> list[torch.fx.Node]:
    if not isinstance(operator, torch._ops.OpOverload):
        return list(writes_of(node).arguments) if writes_of(node).known else []
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Functionalize"):
        return []
    return [
        value
        for position, value in enumerate(node.args)
        if isinstance(value, torch.fx.Node) and is_written(operator, position)
    ]


def _storage(node: torch.fx.Node) -> int | None:
    return storage_of(node.meta.get("example_value"))
