"""Scatters to one position in each row, which kernels compute as a comparison instead of calling torch's operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import expression

SCATTERS = frozenset({torch.ops.aten.scatter.value, torch.ops.aten.scatter.src})


def is_one_hot(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a scatter whose positions have length 1 along its dimension and all others in full."""
    if node.target not in SCATTERS or len(node.args) < 4 or type(node.args[1]) is not int:
        return False
    whole, part = (_sizes(node.args[k]) for k in (0, 2))
    if not whole or part is None:
        return False
    dim = node.args[1] % len(whole)
    return part == [*whole[:dim], 1, *whole[dim + 1 :]]


def _sizes(node: Any) -> list[Any] | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return [expression(size) for size in value.shape] if isinstance(value, torch.Tensor) else None
