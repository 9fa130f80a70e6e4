"""Random numbers of an inference graph from a seed; graphs of training have theirs from before the partition."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.random_numbers import seed_random_numbers


def seed_post_grad_random_numbers(graph_module: torch.fx.GraphModule) -> bool:
    return seed_random_numbers(graph_module)
