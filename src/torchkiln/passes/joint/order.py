"""Topological order at the end of the stage, restored after passes that insert nodes."""

from __future__ import annotations

import torch.fx

from torchkiln.graph.order import stable_topological_sort


def sort_joint_nodes(graph_module: torch.fx.GraphModule) -> bool:
    return stable_topological_sort(graph_module.graph)
