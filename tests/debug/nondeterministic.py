"""Programs that eager does not run the same twice, and one that only seems so."""

from __future__ import annotations

import itertools

import torch

_counter = itertools.count()


@torch.library.custom_op("nondeterministic::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    return x + next(_counter)


@_counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_counted.register_autograd(lambda ctx, gradient: gradient)


def counted_up(x: torch.Tensor) -> torch.Tensor:
    """Larger from call to call."""
    return torch.sin(_counted(x * 2))


def unwritten(x: torch.Tensor) -> torch.Tensor:
    """Reads memory that nobody wrote."""
    return (x * 0 + torch.empty(4)) * 2


def written_first(x: torch.Tensor) -> torch.Tensor:
    """Memory is written before it is read."""
    return torch.empty(4).copy_(x) * 2
