"""No-ops of the joint graph."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.no_ops import remove_no_ops


def remove_joint_no_ops(graph_module: torch.fx.GraphModule) -> bool:
    return remove_no_ops(graph_module, saves_for_backward=True)
