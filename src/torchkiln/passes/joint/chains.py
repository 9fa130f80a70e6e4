"""Chains of views, turned axes and casts in the joint graph."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.chains import collapse_chains


def collapse_joint_chains(graph_module: torch.fx.GraphModule) -> bool:
    return collapse_chains(graph_module)
