"""The backward of attention over short bfloat16 sequences, by batches of small products and kernels between them.

torch's operator takes the same products block by block through oneDNN, which makes a kernel ready for each. Sums are in
float32, and what goes into a product is rounded, as there. Milliseconds of batch x heads x length x width, one thread:

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

from torchkiln.ir.expr import Expr, IndexValue
from torchkiln.ir.index import Index
from torchkiln.lowering.builder import Builder, TensorValue, view_of
from torchkiln.lowering.matmul import wide_product
from torchkiln.lowering.pointwise import compare, literal, op, where
from torchkiln.lowering.reduction import reduce_dims
from torchkiln.lowering.registry import NotLowered, lowers
from torchkiln.lowering.views import broadcast_to

Subscripts = tuple[Index, ...]

# Elements of the scores, which torch's operator never has all of in memory: above that it is as fast.
_MOST_SCORES = 3 * 2**19


@lowers("_scaled_dot_product_flash_attention_for_cpu_backward.default")
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
    width, lengths = query.shape[-1], (query.shape[-2], key.shape[-2])
    scores_shape = (*query.shape[:-2], *lengths)
    sizes = [size for size in (*scores_shape, width) if isinstance(size, int)]
    if dropout_p != 0 or len(sizes) != len(scores_shape) + 1 or math.prod(sizes[:-1]) > _MOST_SCORES:
        raise NotLowered("dropout, long sequences, or sizes known only at run time")
    if logsumexp.shape != query.shape[:-1] or 0 in sizes:
        raise NotLowered("a form of attention that torch has none of today")
    factor = sizes[-1] ** -0.5 if scale is None else scale
    scores = wide_product(builder, query, _transposed(key))
    weight_gradients = wide_product(builder, gradient, _transposed(value))
    mask = None if attn_mask is None else broadcast_to(attn_mask, scores_shape)

    def along(i: Subscripts) -> Expr:
        return op("mul", builder.load(gradient, i, torch.float32), builder.load(out, i, torch.float32))

    shares = reduce_dims(builder, gradient, (len(gradient.shape) - 1,), "sum", along, keepdim=False)

    def weight(i: Subscripts) -> Expr:
        score = scores.at(i)
        score = op("mul", score, literal(factor, score))
        if mask is not None:
            score = op("add", score, builder.load(mask, i, torch.float32))
        found = op("exp", op("sub", score, builder.load(logsumexp, i[:-1], torch.float32)))
        if is_causal:
            seen = compare("le", IndexValue(i[-1], torch.int64), IndexValue(i[-2], torch.int64))
            found = where(seen, found, literal(0.0, found))
        return found

    def score_gradient(i: Subscripts) -> Expr:
        moved = op("sub", weight_gradients.at(i), shares.at(i[:-1]))
        return op("mul", op("mul", weight(i), moved), literal(factor, moved))

    weights = builder.pointwise(scores_shape, query.dtype, weight)
    score_gradients = builder.pointwise(scores_shape, query.dtype, score_gradient)
    products = (
        wide_product(builder, score_gradients, key),
        wide_product(builder, _transposed(score_gradients), query),
        wide_product(builder, _transposed(weights), gradient),
    )
    grad_query, grad_key, grad_value = (builder.pointwise(p.shape, query.dtype, p.at) for p in products)
    return grad_query, grad_key, grad_value


def _transposed(matrix: TensorValue) -> TensorValue:
    *batch, rows, columns = matrix.shape
    return view_of(matrix, (*batch, columns, rows), lambda i: (*i[:-2], i[-1], i[-2]))
