"""Flips along one dimension, and what lies between two of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

_FLIP = torch.ops.aten.flip.default


def is_flip(node: Any, dim: int) -> bool:
    """Whether ``node`` is a flip along ``dim``, counted from 0, and along nothing else."""
    if not isinstance(node, torch.fx.Node) or node.target is not _FLIP:
        return False
    dims: Any = node.args[1]
    return [d % node.meta["val"].dim() for d in dims] == [dim]


def is_between_flips(node: torch.fx.Node, dim: int) -> bool:
    """Whether ``node`` reads a flip along ``dim``, and nothing but flips along it reads ``node``."""
    return is_flip(node.args[0], dim) and bool(node.users) and all(is_flip(user, dim) for user in node.users)
