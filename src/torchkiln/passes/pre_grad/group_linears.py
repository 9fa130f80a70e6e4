"""Parallel linear layers of one shape, of one input or of several, as one batched matmul.

``linear(a, v), linear(b, w)`` becomes ``bmm(stack([a, b]), stack([v, w]).mT)``; one input is not stacked but expanded.
The weights are copied together at each call, since they may change between calls, so this pays for small layers only,
where a call costs as much as the matmul. One thread, 16 rows, before and after: eight layers of one input, 32 to 32
features, 47 and 30 µs; three of 64 to 64 32 and 27; eight of eight inputs 62 and 48. Three of 256 to 256 lose (128 and
143), and three of 768 to 768 with one row more so (346 and 884). So at most ``_COPIED`` elements are copied. With
gradients the copies are made in backward too: then it is not done.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.graph.captured_calls import operand
from torchkiln.graph.fake import is_symbolic, static_shape
from torchkiln.passes.pre_grad.parallel import combine_parallel_calls, take_slices
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, Replacement

_COPIED = 32768


def group_linears(graph_module: torch.fx.GraphModule) -> bool:
    return combine_parallel_calls(graph_module, F.linear, _key, _combine, at_most=_COPIED)


def _key(graph: CapturedGraph, node: torch.fx.Node) -> Hashable | None:
    if len(node.args) != 3:
        return None
    tensors = [graph.tensor(argument) for argument in node.all_input_nodes]
    x, weight = graph.tensor(operand(node)), graph.tensor(operand(node, 1))
    if x is None or weight is None or x.dim() < 2 or weight.dim() != 2 or not x.is_cpu:
        return None
    if any(t is None or is_symbolic(t) or t.dtype != x.dtype for t in (*tensors, graph.tensor(node))):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return None
    return static_shape(x), static_shape(weight), x.dtype, node.args[2] is None


def _combine(graph: CapturedGraph, group: list[torch.fx.Node]) -> bool:
    first = group[0]
    x, weight, result = (graph.tensor(node) for node in (operand(first), operand(first, 1), first))
    assert x is not None
    assert weight is not None
    assert result is not None
    one_input = all(node.args[0] is first.args[0] for node in group)
    copied = math.prod(static_shape(weight)) + (0 if one_input else math.prod(static_shape(x)))
    group = group[: _COPIED // max(1, copied)]
    if len(group) < 2:
        return False
    replacement = Replacement(graph, first)
    call = replacement.call
    *counts, width = static_shape(x)
    rows = math.prod(counts)
    inputs, weights, biases = ([node.args[position] for node in group] for position in range(3))
    if all(value is inputs[0] for value in inputs):
        one = call(torch.reshape, inputs[0], shape=(1, rows, width))
        batch = call(torch.broadcast_to, one, (len(group), rows, width))
    else:
        batch = call(torch.reshape, call(torch.stack, inputs, dim=0), shape=(len(group), rows, width))
    stacked = call(torch.stack, weights, dim=0)
    matmul = call(torch.bmm, batch, call(torch.transpose, stacked, dim0=1, dim1=2))
    if first.args[2] is not None:
        matmul = call(torch.add, matmul, call(torch.unsqueeze, call(torch.stack, biases, dim=0), dim=1))
    return take_slices(replacement, group, call(torch.reshape, matmul, shape=(len(group), *static_shape(result))))
