"""The order in which eager fills memory with random numbers, in one functional graph."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.random_order import draw_in_memory_order


def draw_post_grad_in_memory_order(graph_module: torch.fx.GraphModule) -> bool:
    return draw_in_memory_order(graph_module)
