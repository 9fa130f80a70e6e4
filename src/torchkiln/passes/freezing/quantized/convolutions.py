"""Convolutions of dequantized lines, images and volumes with dequantized weights multiply the integers.

Their weights are packed by oneDNN.

One thread of a Zen 4, 3 x 3 of 64 channels at 56 x 56, batch of 4: 2.2 ms, and 9 in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.graph import quantized_operators as int8
from torchkiln.graph.fake import is_channels_last, size_hint
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor, replace, rewrite_each
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values
from torchkiln.passes.freezing.quantized.affine import dequantized, quantized_weight
from torchkiln.passes.freezing.quantized.calls import (
    as_float32,
    constants,
    contiguous,
    has_int8_matmuls,
    insert_scales,
    is_constant,
    unsigned,
)
from torchkiln.target import Target

_aten = torch.ops.aten
Node = torch.fx.Node

# With batch and channels. The older operator is for images alone, and lines are images.
_DIMENSIONS = (3, 4) if int8.QCONV is None or "conv2d" in int8.QCONV.name() else (3, 4, 5)


def multiply_convolution_integers(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    found = calls_of(graph, _aten.convolution.default)
    if not found or int8.QCONV is None or int8.QCONV_PREPACK is None or not has_int8_matmuls(target):
        return False
    promised = returned_values(graph)
    changed = rewrite_each(found, partial(_multiply_integers, constant=constants(graph)))
    if changed:
        keep_output_strides(graph, promised)
    return changed


def _multiply_integers(node: Node, constant: frozenset[Node]) -> bool:
    before = node.meta["val"]
    made = _rewritten(node, constant)
    if made is None:
        return False
    replace(node, made)
    propagate_strides(made.graph, {made: before})
    return True


def obstacle(node: Node, constant: frozenset[Node]) -> str:
    """Why a convolution cannot multiply integers; empty where it can."""
    value, weight, known = dequantized(node.args[0]), quantized_weight(node.args[1]), fake_tensor(node)
    if value is None:
        return "the image is not quantized"
    if weight is None:
        return "the weight is not int8 with symmetric scales"
    if known is None or node.args[6] or known.dim() not in _DIMENSIONS:
        return "it is transposed, or this torch has none of so many dimensions"
    if not value.affine.is_static or value.affine.dtype not in (torch.uint8, torch.int8):
        return "the image is not quantized to bytes with a fixed scale"
    if known.dtype not in (torch.float32, torch.bfloat16):
        return f"its result is {known.dtype}"
    if not is_constant(weight, constant) or weight.axis != 0:
        return "the weight is no parameter, or its scales are not of output channels"
    return ""


def _rewritten(node: Node, constant: frozenset[Node]) -> Node | None:
    if obstacle(node, constant):
        return None
    arguments: Any = node.args
    image, weight, bias, stride, padding, dilation, _, _, groups = arguments
    value, factors, known = dequantized(image), quantized_weight(weight), fake_tensor(node)
    assert value is not None
    assert factors is not None
    assert known is not None
    assert int8.QCONV is not None
    assert int8.QCONV_PREPACK is not None
    bytes_ = unsigned(node, value)
    integers, weights = bytes_.stored, factors.stored
    lines = known.dim() == 3
    if lines:  # images of one row: torch gives lines other strides than it says
        integers, weights = (insert_call(node, _aten.unsqueeze.default, part, 2) for part in (integers, weights))
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    geometry = [list(stride), list(padding), list(dilation), groups]
    integers = _channels_last(node, integers)
    sizes = [size_hint(size) for size in integers.meta["val"].shape]
    given = insert_scales(node, factors)
    scale = bytes_.scale, bytes_.zero_point
    packed = insert_call(node, int8.QCONV_PREPACK, contiguous(node, weights), given.scales, *scale, *geometry, sizes)
    operands = (integers, *scale, packed, given.scales, given.zero_points, as_float32(node, bias), *geometry)
    made = insert_call(node, int8.QCONV, *operands, 1.0, 0, known.dtype, "none", [], "")
    return insert_call(node, _aten.squeeze.dim, made, 2) if lines else made


def _channels_last(before: Node, integers: Node) -> Node:
    known = fake_tensor(integers)
    assert known is not None
    if is_channels_last(known):
        return integers
    memory_format = torch.channels_last if known.dim() == 4 else torch.channels_last_3d
    return insert_call(before, _aten.clone.default, integers, memory_format=memory_format)
