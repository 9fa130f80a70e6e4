"""Linear layers whose result is transposed and copied: ``linear(x, w, b).transpose(-1, -2).contiguous()``.

The matmul of the weight and the transposed input is the transposed result, so it can be written where the copy would
go: ``addmm(b[:, None], w, x.t())``, or ``bmm`` for a batch. BLAS reads transposed operands at no cost.
Without ``contiguous`` there is no copy to spare, and the strides eager gives would be lost.

One thread: 8 x 512 rows of 64 to 64 features 491 µs before, 400 after; 2048 rows 205 and 187; 512 rows of 512 to 512
features 2005 and 1860.
"""

from __future__ import annotations

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.graph.captured_calls import is_call, operand
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, Replacement, rewrite_calls
from torchkiln.passes.pre_grad.transposes import copied_transpose


def transpose_linears(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_calls(graph_module, {"contiguous"}, _transpose)


def _transpose(graph: CapturedGraph, copy: torch.fx.Node) -> bool:
    transpose, linear = copied_transpose(graph, copy) or (None, None)
    if transpose is None or not is_call(linear, F.linear) or len(linear.args) != 3:
        return False
    x, weight, bias = operand(linear), operand(linear, 1), operand(linear, 2)
    if x is None or weight is None or (bias is None and linear.args[2] is not None):
        return False
    if set(linear.users) != {transpose} or set(transpose.users) != {copy}:
        return False
    rows, matrix, result = (graph.tensor(node) for node in (x, weight, linear))
    if rows is None or matrix is None or rows.dim() not in (2, 3) or matrix.dim() != 2 or rows.dtype != matrix.dtype:
        return False
    if result is None or result.dtype != rows.dtype:  # under autocast the matmul is of another type
        return False
    if not graph.memory.undisturbed([*linear.all_input_nodes, linear], linear, copy):
        return False
    batch = (rows.shape[0], *matrix.shape)
    if rows.dim() == 3 and any(type(size) is not int for size in batch):
        return False

    replacement = Replacement(graph, copy)
    call = replacement.call
    columns = call(torch.transpose, x, dim0=rows.dim() - 2, dim1=rows.dim() - 1)
    column = None if bias is None else call(torch.unsqueeze, bias, dim=1)
    if rows.dim() == 3:
        matmul = call(torch.bmm, call(torch.broadcast_to, weight, batch), columns)
        matmul = matmul if column is None else call(torch.add, matmul, column)
    elif column is None:
        matmul = call(torch.mm, weight, columns)
    else:
        matmul = call(torch.addmm, column, weight, columns)
    return replacement.take_place([copy], [matmul])
