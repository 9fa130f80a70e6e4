"""Which tensors are of no subclass."""

from __future__ import annotations

import torch


def is_no_subclass(value: object) -> bool:
    """Whether ``value`` is a tensor of torch's own class, or a parameter, which differs from one only in name."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)
