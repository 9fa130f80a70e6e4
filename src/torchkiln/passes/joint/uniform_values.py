"""Tensors of one number in the joint graph, which backward is full of."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.uniform_values import fold_uniform_values


def fold_joint_uniform_values(graph_module: torch.fx.GraphModule) -> bool:
    return fold_uniform_values(graph_module, saves_for_backward=True)
