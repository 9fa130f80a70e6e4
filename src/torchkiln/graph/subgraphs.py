"""Graphs inside graphs: the bodies that higher-order operators (cond, while_loop, checkpoint) call."""

from __future__ import annotations

import operator

import torch.fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchkiln.graph.fake import attribute_of


def subgraphs(graph_module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Every graph module reached through ``get_attr``, however deep, inner ones before the ones that use them."""
    found: dict[torch.fx.GraphModule, None] = {}
    pending: list[tuple[torch.fx.GraphModule, bool]] = [(graph_module, False)]
    seen = {graph_module}
    while pending:
        module, expanded = pending.pop()
        if expanded:
            found[module] = None
            continue
        pending.append((module, True))
        for node in module.graph.find_nodes(op="get_attr"):
            inner = attribute_of(module, str(node.target))
            if isinstance(inner, torch.fx.GraphModule) and inner not in seen:
                seen.add(inner)
                pending.append((inner, False))
    del found[graph_module]
    return list(found)


def operations(graph_module: torch.fx.GraphModule) -> int:
    """How many nodes compute something, those of subgraphs included: calls, but not the parts of a tuple."""
    return sum(
        node.op.startswith("call_") and node.target is not operator.getitem
        for module in [*subgraphs(graph_module), graph_module]
        for node in module.graph.nodes
    )


# Where Dynamo notes, on inputs and on the module, which variable of the user's each comes from: AOTAutograd makes
# guards of it, and knows the inputs whose memory stays where it is.
_SOURCE, _SOURCES_OF_PARAMETERS = "_dynamo_source", "_param_name_to_source"


def copy_graph_module(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph module with nodes of its own that shares parameters, constants and subgraphs with the original."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph_module.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        if hasattr(node, _SOURCE):
            setattr(values[node], _SOURCE, getattr(node, _SOURCE))
    graph.set_codegen(graph_module.graph._codegen)
    copy = module_of(graph_module, graph)
    if hasattr(graph_module, _SOURCES_OF_PARAMETERS):
        setattr(copy, _SOURCES_OF_PARAMETERS, getattr(graph_module, _SOURCES_OF_PARAMETERS))
    return copy


def forget_sources(graph_module: torch.fx.GraphModule) -> None:
    """Say that the inputs of ``graph_module`` are no longer those Dynamo made: AOTAutograd asks each for its source."""
    vars(graph_module).pop(_SOURCES_OF_PARAMETERS, None)


def module_of(root: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph module for ``graph`` with the parameters, constants and subgraphs of ``root`` that it names.

    Its Python code is generated when it is first called, which for most graphs here is never.
    """
    module = _LazyGraphModule(root, graph)
    module.meta = dict(root.meta)
    return module
