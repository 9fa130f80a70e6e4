"""Graphs that take lists of tensors, as those of compiled autograd do: each tensor becomes an input of its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch.utils import _pytree as pytree

from torchkiln.graph.subgraphs import copy_graph_module, forget_sources

_NESTED = (list, tuple, dict)


def has_nested_inputs(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, _NESTED) for value in inputs)


@dataclass(frozen=True)
class FlatGraph:
    """A graph without nested inputs, and its inputs.

    ``consumed`` are the lists that a call of the nested graph empties, None where there was none to flatten.
    """

    graph_module: torch.fx.GraphModule
    inputs: Sequence[Any]
    consumed: tuple[int, ...] | None = None


def flatten_inputs(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> FlatGraph:
    """A copy of ``graph_module`` that takes the leaves of ``inputs``, in order, in their place."""
    flat = copy_graph_module(graph_module)
    forget_sources(flat)
    consumed = []
    for position, (placeholder, value) in enumerate(
        zip(flat.graph.find_nodes(op="placeholder"), inputs, strict=True)
    ):
        if not isinstance(value, _NESTED):
            continue
        if placeholder.meta.get("steal_arg", False):
            consumed.append(position)
        leaves, structure = pytree.tree_flatten(value)
        with flat.graph.inserting_before(placeholder):
            nodes = [flat.graph.placeholder(f"{placeholder.name}_{k}") for k in range(len(leaves))]
        for node, leaf in zip(nodes, leaves, strict=True):
            node.meta["example_value"] = leaf
        _replace(placeholder, pytree.tree_unflatten(nodes, structure))
    flat.recompile()
    return FlatGraph(flat, tuple(pytree.arg_tree_leaves(*inputs)), tuple(consumed))


def _replace(nested: torch.fx.Node, parts: Any) -> None:
    """Let readers of ``nested`` read ``parts``, nodes in a list, tuple or dictionary, and erase it."""
    for reader in list(nested.users):
        if reader.target is operator.getitem and not isinstance(reader.args[1], torch.fx.Node):
            part = parts[reader.args[1]]
            if isinstance(part, torch.fx.Node):
                part.meta = {**reader.meta, **part.meta}
                reader.replace_all_uses_with(part)
                reader.graph.erase_node(reader)
            else:
                _replace(reader, part)
        else:
            reader.args = torch.fx.map_arg(reader.args, lambda node: parts if node is nested else node)
            reader.kwargs = torch.fx.map_arg(reader.kwargs, lambda node: parts if node is nested else node)
    nested.graph.erase_node(nested)
