"""Scatters to one index in each row, which kernels compute as a comparison instead of calling torch's operator."""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.graph.fake import expression
from torchkiln.graph.nodes import fake_tensor

SCATTERS = frozenset({torch.ops.aten.scatter.value, torch.ops.aten.scatter.src})


def is_one_hot(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a scatter whose index has length 1 along its dimension and all others in full."""
    if node.target not in SCATTERS or len(node.args) < 4 or type(node.args[1]) is not int:
        return False
    whole, part = (fake_tensor(node.args[k]) for k in (0, 2))
    if whole is None or part is None or whole.dim() == 0:
        return False
    sizes = list(map(expression, whole.shape))
    sizes[node.args[1] % len(sizes)] = 1
    return list(map(expression, part.shape)) == sizes
