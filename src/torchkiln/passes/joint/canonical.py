"""The canonical spelling of the operators of the joint graph."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.canonical import canonicalize


def canonicalize_joint_graph(graph_module: torch.fx.GraphModule) -> bool:
    return canonicalize(graph_module)
