"""Matmuls so thin or small that memory is what they cost, decomposed into multiplications and additions.

Those are fused with the kernels around them. One thread, float32, microseconds for the library and decomposed:

| matmul | library | here |
|---|---|---|
| 1024 x 1 x 64 | 34 | 31 |
| 100 times 1000 x 1 x 64 | 3132 | 2665 |
| 4096 x 2 x 512 | 932 | 792 |
| 100000 x 4 x 4 | 338 | 277 |
| 4096 x 8 x 256 | 389 | 315 |
| the last with the second matrix transposed | 440 | 2186 |
| 4096 x 16 x 64 (as multiplication and sum) | 175 | 184 |
| 1024 times 4 x 4 x 4 | 124 | 42 |
| 1 x 4096 x 1024 (as multiplication and sum) | 781 | 902 |

So: up to eight terms where rows of the second matrix are contiguous, one term always, and batches of matrices of
at most four rows, terms and columns. A vector times a matrix stays with the library. Floats only: of half precision the
library rounds the sum, not its terms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import has_one_dtype
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor, replace_if_alike, rewrite_each

_aten = torch.ops.aten

_DTYPES = (torch.float32, torch.float64)
_MOST_TERMS = 8
_SMALL = 4


def decompose_small_matmuls(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_each(calls_of(graph_module.graph, _aten.mm.default, _aten.bmm.default), _decompose)


def _is_worth_it(node: torch.fx.Node) -> bool:
    left, right = fake_tensor(node.args[0]), fake_tensor(node.args[1])
    if left is None or right is None or left.dtype not in _DTYPES or not has_one_dtype(node):
        return False
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return False
    rows, terms, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if not isinstance(terms, int) or terms < 1:
        return False
    if terms == 1:
        return True
    if left.dim() == 3:
        return all(isinstance(size, int) and size <= _SMALL for size in (rows, terms, columns))
    step, several = right.stride(-1), not isinstance(columns, int) or columns > 1
    return terms <= _MOST_TERMS and isinstance(step, int) and step == 1 and several


def _decompose(node: torch.fx.Node) -> bool:
    if not _is_worth_it(node):
        return False
    left: Any = node.args[0]
    right: Any = node.args[1]
    rank, terms = left.meta["val"].dim(), left.meta["val"].shape[-1]
    made: list[torch.fx.Node] = []

    def call(target: torch._ops.OpOverload, *args: Any) -> torch.fx.Node:
        made.append(insert_call(node, target, *args))
        return made[-1]

    total: torch.fx.Node | None = None
    for k in range(terms):
        column, row = left, right
        if terms > 1:
            column = call(_aten.slice.Tensor, left, rank - 1, k, k + 1)
            row = call(_aten.slice.Tensor, right, rank - 2, k, k + 1)
        term = call(_aten.mul.Tensor, column, row)
        total = term if total is None else call(_aten.add.Tensor, total, term)
    return replace_if_alike(node, made)  # eager's strides are the library's
