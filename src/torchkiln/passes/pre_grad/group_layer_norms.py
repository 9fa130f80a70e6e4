"""Parallel layer norms of one shape as one layer norm over the stacked inputs.

On the CPU this gains nothing: a layer norm is one kernel, and the inputs have to be copied together (one thread: eight
of 16 x 64 took 31 µs both ways, four of 128 x 256 58 µs instead of 53, four of 1024 x 768 1355 instead of 1217). It is
there for devices where a launch costs more than a copy, and off unless the setting ``group_layer_norms`` asks for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from torchkiln.config import Settings
from torchkiln.graph.captured_calls import operand
from torchkiln.graph.fake import is_symbolic, static_shape
from torchkiln.passes.pre_grad.parallel import combine_parallel_calls, take_slices
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, Replacement

_MOST = 64


def is_wanted(settings: Settings) -> bool:
    return settings.group_layer_norms


def group_layer_norms(graph_module: torch.fx.GraphModule) -> bool:
    return combine_parallel_calls(graph_module, F.layer_norm, _key, _combine, at_most=_MOST)


def _key(graph: CapturedGraph, node: torch.fx.Node) -> Hashable | None:
    if len(node.args) != 1 or "normalized_shape" not in node.kwargs:
        return None
    x = graph.tensor(operand(node))
    tensors = [graph.tensor(argument) for argument in (*node.all_input_nodes, node)]
    if x is None or any(t is None or is_symbolic(t) or t.dtype != x.dtype for t in tensors):
        return None
    rest = f"{_sizes(node)} {node.kwargs.get('eps')!r}"
    return static_shape(x), x.dtype, rest, *(node.kwargs.get(name) is None for name in ("weight", "bias"))


def _sizes(node: torch.fx.Node) -> tuple[Any, ...]:
    sizes = node.kwargs["normalized_shape"]
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)


def _combine(graph: CapturedGraph, group: list[torch.fx.Node]) -> bool:
    first = group[0]
    replacement = Replacement(graph, first)
    call = replacement.call
    x = graph.tensor(operand(first))
    assert x is not None
    sizes = _sizes(first)
    result = call(
        F.layer_norm,
        call(torch.stack, [node.args[0] for node in group], dim=0),
        normalized_shape=first.kwargs["normalized_shape"],
        weight=None,
        bias=None,
        eps=first.kwargs.get("eps", 1e-5),
    )
    # One weight and bias per input, of the normalized sizes, broadcast over the dimensions in between.
    shape = (len(group), *(1 for _ in range(x.dim() - len(sizes))), *sizes)
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if first.kwargs.get(name) is not None:
            stacked = call(torch.stack, [node.kwargs[name] for node in group], dim=0)
            result = call(apply, result, call(torch.reshape, stacked, shape=shape))
    return take_slices(replacement, group, result)
