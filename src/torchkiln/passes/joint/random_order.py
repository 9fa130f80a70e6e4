"""The order in which eager fills memory with random numbers, in a joint graph."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.random_order import draw_in_memory_order


def draw_joint_in_memory_order(graph_module: torch.fx.GraphModule) -> bool:
    return draw_in_memory_order(graph_module)
