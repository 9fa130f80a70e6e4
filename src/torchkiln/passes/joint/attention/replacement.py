"""What takes the place of attention written out: one ``scaled_dot_product_attention``, right also for empty rows.

A row of the mask is empty where a query may see no key. Written out, the softmax of such a row is NaN where hidden
scores are minus infinity, and uniform where they are a large negative number; the fused operator gives zeros for the
first, and wrong gradients for the second. What is added here to the operator makes up for both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    hidden: Tensor | None = None,
    fill: float = -math.inf,
    dropout_p: float = 0.0,
    grouped: bool = False,
) -> Tensor:
    """Attention of batches of heads. ``mask`` is added to the scores; scores that are ``hidden`` become ``fill``.

    Inputs of three dimensions are heads without a batch. With ``grouped`` heads of keys serve several queries each.
    """
    rank = query.dim()
    if rank == 3:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
    weight = None
    if hidden is not None:
        query, mask = _seeing_something(query, hidden, fill)
    elif mask is not None:
        query, weight = _as_softmax_would(query, mask)
    if mask is not None and mask.dim() != 2:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=grouped
    )
    if weight is not None:
        result = _WeightedGradient.apply(result, weight)
    return result.squeeze(0) if rank == 3 else result


def _seeing_something(query: Tensor, hidden: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """Queries, and what each may see; those without a key to see are made to see all alike, or to be NaN."""
    empty = hidden.all(-1, keepdim=True)
    query = query.masked_fill(empty, math.nan if fill == -math.inf else 0.0)
    return query, empty.logical_or(hidden.logical_not())


def _as_softmax_would(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries with NaN where the mask has nothing but minus infinity; and the weight of every row's gradient.

    Backward recomputes a row of the softmax as ``exp(score - logsumexp)``. Next to a mask like the lowest float32,
    the logarithm of the number of keys is lost in that sum, and every entry comes out as 1. Since all gradients of a
    row are linear in that of its result, the weight of the row sets them right.
    """
    highest = mask.amax(-1, keepdim=True)
    nothing = torch.where(highest == -math.inf, math.nan, 0.0).to(query.dtype)
    if not query.requires_grad:
        return query + nothing, None
    count = (mask == highest).sum(-1, keepdim=True)
    weight = torch.where(highest <= _absorbing(query.dtype), 1 / count, 1.0).to(query.dtype)
    return query + nothing, weight


def _absorbing(dtype: torch.dtype) -> float:
    """Added to a number at or below this, in the precision attention is computed in, scores make no difference.

    Neighbours are 32 apart there, more than twice the logarithm of any number of keys.
    """
    computed_in = torch.float64 if dtype == torch.float64 else torch.float32
    return -32 / torch.finfo(computed_in).eps


class _WeightedGradient(torch.autograd.Function):
    """Its argument; the gradient is multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * weight, None
