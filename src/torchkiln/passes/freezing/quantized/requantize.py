"""Quantizing the result of an int8 call becomes part of the call, which then stores integers."""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.passes.freezing.quantized.affine import quantizes
from torchkiln.passes.freezing.quantized.calls import gives_numbers, int8_calls, reached, take_over


def quantize_results(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    if next(int8_calls(graph), None) is None:
        return False
    changed = False
    for node in list(graph.nodes):
        if not node._erased:
            changed |= _fold(node)
    return changed


def _fold(node: torch.fx.Node) -> bool:
    found = quantizes(node)
    source = reached(found.stored) if found is not None else None
    if found is None or source is None or not gives_numbers(source.call):
        return False
    affine = found.affine
    if not affine.is_static or not affine.is_full_range or affine.dtype not in (torch.uint8, torch.int8):
        return False
    scale = {"output_scale": affine.scale, "output_zero_point": affine.zero_point, "output_dtype": affine.dtype}
    return take_over(node, source, **scale)
