"""No-ops of a forward, backward or inference graph."""

from __future__ import annotations

import torch.fx

from torchkiln.passes.no_ops import remove_no_ops


def remove_post_grad_no_ops(graph_module: torch.fx.GraphModule) -> bool:
    return remove_no_ops(graph_module, saves_for_backward=False)
