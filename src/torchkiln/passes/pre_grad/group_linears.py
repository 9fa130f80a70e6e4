"""Parallel linear layers of one shape, of one input or of several, as one batched product.

``linear(a, v), linear(b, w)`` becomes ``bmm(stack([a, b]), stack([v, w]).mT)``; one input is not stacked but expanded.
The weights are copied together at each call, since they may change between calls, so this pays for small layers only,
where a call costs as much as the product. One thread, 16 rows, before and after: eight layers of one input, 32 to 32
features, 47 and 30 µs; three of 64 to 64 32 and 27; eight of eight inputs 62 and 48. Three of 256 to 256 lose (128 and
143), and three of 768 to 768 with one row more so (346 and 884). So at most ``_COPIED`` elements are copied. With
gradients the copies are made in backward too: then it is not done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.graph.captured_calls import is_call, operand, tensor_of
from torchkiln.graph.captured_memory import Memory
from torchkiln.graph.fake import is_symbolic, known_shape
from torchkiln.passes.pre_grad.parallel import parallel_groups
from torchkiln.passes.pre_grad.replacement import Replacement

_COPIED = 32768

_Key = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


def group_linears(graph_module: torch.fx.GraphModule) -> bool:
    memory = Memory(graph_module)
    if not memory.steady:
        return False
    changed = False
    for group in parallel_groups(memory, _small_linears(graph_module), at_most=_COPIED):
        few = _few_enough(graph_module, group)
        if len(few) > 1:
            changed |= _group(graph_module, memory, few)
    return changed


def _small_linears(graph_module: torch.fx.GraphModule) -> Iterator[tuple[_Key, torch.fx.Node]]:
    for node in graph_module.graph.nodes:
        if not is_call(node, F.linear) or len(node.args) != 3:
            continue
        tensors = [tensor_of(graph_module, argument) for argument in node.all_input_nodes]
        x, weight = tensor_of(graph_module, operand(node)), tensor_of(graph_module, operand(node, 1))
        if x is None or weight is None or x.dim() < 2 or weight.dim() != 2 or not x.is_cpu:
            continue
        result = tensor_of(graph_module, node)
        if any(t is None or is_symbolic(t) or t.dtype != x.dtype for t in (*tensors, result)):
            continue
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            continue
        yield (known_shape(x), known_shape(weight), x.dtype, node.args[2] is None), node


def _few_enough(graph_module: torch.fx.GraphModule, group: list[torch.fx.Node]) -> list[torch.fx.Node]:
    """The first calls of ``group`` for which not too much is copied."""
    x, weight = tensor_of(graph_module, operand(group[0])), tensor_of(graph_module, operand(group[0], 1))
    assert x is not None
    assert weight is not None
    one_input = all(operand(node) is operand(group[0]) for node in group)
    copied = math.prod(known_shape(weight)) + (0 if one_input else math.prod(known_shape(x)))
    return group[: _COPIED // max(1, copied)]


def _group(graph_module: torch.fx.GraphModule, memory: Memory, group: list[torch.fx.Node]) -> bool:
    first = group[0]
    replacement = Replacement(graph_module, memory, first)
    call = replacement.call

    inputs = [node.args[0] for node in group]
    x, result = tensor_of(graph_module, operand(first)), tensor_of(graph_module, first)
    assert x is not None
    assert result is not None
    *counts, width = known_shape(x)
    rows = math.prod(counts)
    if all(value is inputs[0] for value in inputs):
        one = call(torch.reshape, inputs[0], shape=(1, rows, width))
        batch = call(torch.broadcast_to, one, (len(group), rows, width))
    else:
        batch = call(torch.reshape, call(torch.stack, inputs, dim=0), shape=(len(group), rows, width))
    weights = call(torch.stack, [node.args[1] for node in group], dim=0)
    product = call(torch.bmm, batch, call(torch.transpose, weights, dim0=1, dim1=2))
    if first.args[2] is not None:
        shift = call(torch.unsqueeze, call(torch.stack, [node.args[2] for node in group], dim=0), dim=1)
        product = call(torch.add, product, shift)
    shaped = call(torch.reshape, product, shape=(len(group), *known_shape(result)))
    parts = [call(torch.select, shaped, dim=0, index=index) for index in range(len(group))]
    return replacement.take_place(group, parts)
