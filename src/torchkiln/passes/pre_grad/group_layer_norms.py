"""Parallel layer norms of one shape as one, over the inputs put on top of each other.

On the CPU this gains nothing: a layer norm is one kernel, and the inputs have to be copied together (one thread: eight
of 16 x 64 took 31 µs both ways, four of 128 x 256 58 µs instead of 53, four of 1024 x 768 1355 instead of 1217). It is
there for devices where a launch costs more than a copy, and off unless the setting ``group_layer_norms`` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.config import Settings
from torchkiln.graph.captured_calls import is_call, operand, tensor_of
from torchkiln.graph.captured_memory import Memory
from torchkiln.graph.fake import is_symbolic, known_shape
from torchkiln.passes.pre_grad.parallel import parallel_groups
from torchkiln.passes.pre_grad.replacement import Replacement

_MOST = 64

_Key = tuple[tuple[int, ...], torch.dtype, str, bool, bool]


def is_wanted(settings: Settings) -> bool:
    return settings.group_layer_norms


def group_layer_norms(graph_module: torch.fx.GraphModule) -> bool:
    memory = Memory(graph_module)
    if not memory.steady:
        return False
    changed = False
    for group in parallel_groups(memory, _layer_norms(graph_module), at_most=_MOST):
        changed |= _group(graph_module, memory, group)
    return changed


def _layer_norms(graph_module: torch.fx.GraphModule) -> Iterator[tuple[_Key, torch.fx.Node]]:
    for node in graph_module.graph.nodes:
        if not is_call(node, F.layer_norm) or len(node.args) != 1 or "normalized_shape" not in node.kwargs:
            continue
        x = tensor_of(graph_module, operand(node))
        tensors = [tensor_of(graph_module, argument) for argument in (*node.all_input_nodes, node)]
        if x is None or any(t is None or is_symbolic(t) or t.dtype != x.dtype for t in tensors):
            continue
        rest = f"{tuple(_sizes(node))} {node.kwargs.get('eps')!r}"
        yield (known_shape(x), x.dtype, rest, _lacks(node, "weight"), _lacks(node, "bias")), node


def _sizes(node: torch.fx.Node) -> tuple[Any, ...]:
    sizes = node.kwargs["normalized_shape"]
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)


def _lacks(node: torch.fx.Node, name: str) -> bool:
    return node.kwargs.get(name) is None


def _group(graph_module: torch.fx.GraphModule, memory: Memory, group: list[torch.fx.Node]) -> bool:
    first = group[0]
    replacement = Replacement(graph_module, memory, first)
    call = replacement.call

    x = tensor_of(graph_module, operand(first))
    assert x is not None
    sizes = _sizes(first)
    # One weight for each input, of the sizes that are normalized, the same for all that come before them.
    shape = (len(group), *(1 for _ in range(x.dim() - len(sizes))), *sizes)

    def stacked(name: str) -> torch.fx.Node:
        return call(torch.reshape, call(torch.stack, [node.kwargs[name] for node in group], dim=0), shape=shape)

    whole = call(torch.stack, [node.args[0] for node in group], dim=0)
    options = {"normalized_shape": first.kwargs["normalized_shape"], "weight": None, "bias": None}
    result = call(F.layer_norm, whole, **options, eps=first.kwargs.get("eps", 1e-5))
    if not _lacks(first, "weight"):
        result = call(torch.mul, result, stacked("weight"))
    if not _lacks(first, "bias"):
        result = call(torch.add, result, stacked("bias"))
    parts = [call(torch.select, result, dim=0, index=index) for index in range(len(group))]
    return replacement.take_place(group, parts)
