"""Random numbers of forward and backward from seeds, so that backward makes masks again instead of keeping them."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.random_numbers import seed_random_numbers


def seed_joint_random_numbers(graph_module: torch.fx.GraphModule) -> bool:
    return seed_random_numbers(graph_module)
