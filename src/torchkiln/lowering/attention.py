"""The backward of attention over short bfloat16 sequences, by batches of small matmuls and kernels between them.

torch's operator takes the same matmuls block by block through oneDNN, which makes a kernel ready for each. Sums are in
float32, and what goes into a matmul is rounded, as there. Milliseconds of batch x heads x length x width, one thread:

| | operator | here |
|---|---|---|
| 4 x 4 x 64 x 32 | 2.5 | 0.3 |
| 2 x 12 x 128 x 64 | 12.9 | 3.1 |
| 2 x 12 x 256 x 64 | 17.7 | 12.4 |
| 1 x 8 x 512 x 64 | 12.5 | 12.5 |
"""

from __future__ import annotations

import math

import torch

from torchkiln.ir.expr import Expr, index_value, op, where
from torchkiln.lowering.builder import Builder, Subscripts, TensorValue, view_of
from torchkiln.lowering.matmul import small_bfloat16_matmul
from torchkiln.lowering.reduction import reader, reduce_dims
from torchkiln.lowering.registry import NotLowered, lowers
from torchkiln.lowering.views import broadcast_to

# Elements of the scores, which torch's operator never has all of in memory: above that it is as fast.
_MOST_SCORES = 3 * 2**19


@lowers("_scaled_dot_product_flash_attention_for_cpu_backward")
def lower_attention_backward(
    builder: Builder,
    gradient: TensorValue,
    query: TensorValue,
    key: TensorValue,
    value: TensorValue,
    out: TensorValue,
    logsumexp: TensorValue,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: TensorValue | None = None,
    scale: float | None = None,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    if dropout_p != 0 or logsumexp.shape != query.shape[:-1]:
        raise NotLowered("dropout, or a form of attention that torch has none of today")
    *scores_shape, width = _short_sizes(query, key)
    factor = width**-0.5 if scale is None else scale
    scores = _matmul(builder, query, _transposed(key))
    weight_gradients = _matmul(builder, gradient, _transposed(value))
    g, o, lse = (reader(builder, given, torch.float32) for given in (gradient, out, logsumexp))
    mask = None if attn_mask is None else reader(builder, broadcast_to(attn_mask, scores_shape), torch.float32)
    last = len(gradient.shape) - 1
    shares = reduce_dims(builder, gradient, (last,), "sum", lambda i: g(i) * o(i), keepdim=False)

    def weight(i: Subscripts) -> Expr:
        score = scores.at(i) * factor
        if mask is not None:
            score = score + mask(i)
        found = op("exp", score - lse(i[:-1]))
        return where(index_value(i[-1]) <= index_value(i[-2]), found, 0.0) if is_causal else found

    def score_gradient(i: Subscripts) -> Expr:
        return weight(i) * (weight_gradients.at(i) - shares.at(i[:-1])) * factor

    weights = builder.pointwise(scores_shape, query.dtype, weight)
    score_gradients = builder.pointwise(scores_shape, query.dtype, score_gradient)
    found = [
        _matmul(builder, score_gradients, key),
        _matmul(builder, _transposed(score_gradients), query),
        _matmul(builder, _transposed(weights), gradient),
    ]
    grad_query, grad_key, grad_value = (builder.pointwise(f.shape, query.dtype, f.at) for f in found)
    return grad_query, grad_key, grad_value


def _matmul(builder: Builder, left: TensorValue, right: TensorValue) -> TensorValue:
    """A small matmul; one that is declined is said to be part of attention."""
    try:
        return small_bfloat16_matmul(builder, left, right)
    except NotLowered as declined:
        raise NotLowered(f"its matmuls are none for kernels: {declined}") from declined


def _short_sizes(query: TensorValue, key: TensorValue) -> list[int]:
    """The shape of the scores, and the width of a query."""
    sizes = (*query.shape[:-1], key.shape[-2], query.shape[-1])
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) != len(sizes) or 0 in known or math.prod(known[:-1]) > _MOST_SCORES:
        raise NotLowered("long sequences, empty ones, or symbolic sizes")
    return known


def _transposed(matrix: TensorValue) -> TensorValue:
    *batch, rows, columns = matrix.shape
    return view_of(matrix, (*batch, columns, rows), lambda i: (*i[:-2], i[-1], i[-2]))
