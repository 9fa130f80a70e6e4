"""Mutating calls in their functional form: which arguments share memory in the program is noted before any pass."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.program_memory import NOTED, ProgramMemory


def mutating_calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The calls of mutating operators in their functional form, in graph order."""
    return [node for node in graph.nodes if node.target in (auto_functionalized, auto_functionalized_v2)]


def note_shared_arguments(graph_module: torch.fx.GraphModule) -> bool:
    """Note the memory of every argument, unless an earlier stage has."""
    calls = [node for node in mutating_calls(graph_module.graph) if NOTED not in node.meta]
    if calls:
        aliases = Aliases(graph_module.graph)
        for node in calls:
            node.meta[NOTED] = _memory_of_arguments(node, aliases)
    return False


def _memory_of_arguments(node: torch.fx.Node, aliases: Aliases) -> dict[str, Any]:
    numbers: dict[torch.fx.Node, int] = {}

    def memory(source: torch.fx.Node) -> Any:
        return ProgramMemory(numbers.setdefault(aliases.root(source), len(numbers)))

    noted: dict[str, Any] = torch.fx.map_arg(dict(node.kwargs), memory)
    return noted
