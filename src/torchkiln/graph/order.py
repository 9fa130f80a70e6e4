"""Topological order of FX graphs."""

from __future__ import annotations

import heapq
import itertools

import torch.fx


def stable_topological_sort(graph: torch.fx.Graph) -> bool:
    """Move nodes so that each comes after its inputs; returns whether anything moved.

    Among nodes that are ready, the one that came first before comes first again, so a graph that is in order is
    left as it is. Raises ValueError for a cycle.
    """
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    if all(position[source] < index for index, node in enumerate(nodes) for source in node.all_input_nodes):
        return False
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [position[node] for node in nodes if waiting[node] == 0]
    order: list[torch.fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for user in node.users:
            waiting[user] -= 1
            if waiting[user] == 0:
                heapq.heappush(ready, position[user])
    if len(order) != len(nodes):
        stuck = next(node for node in nodes if waiting[node] > 0)
        raise ValueError(f"the graph has a cycle through node {stuck}")
    for earlier, later in itertools.pairwise(order):
        earlier.append(later)
    return True


def sort_nodes(graph_module: torch.fx.GraphModule) -> bool:
    """The pass: order restored after passes that insert nodes."""
    return stable_topological_sort(graph_module.graph)
