"""Convolutions of 1 x 1 with the channels innermost are matrix products of pixels and channels.

The library that computes convolutions puts weights into a layout of its own at every call; the one for products reads
them as they are. An image with its channels last is a matrix already, with a pixel in each row, so that nothing is
copied.

One thread, float32, batch of 2, microseconds for convolution and product: 64 to 256 channels at 40 x 40 943 and 690;
16 to 96 at 80 x 80 618 and 353; 512 to 1024 at 10 x 10 1650 and 1386; 2048 to 512 at 5 x 5 1357 and 972; at worst 172
and 131, so it is done always. Of bfloat16, with AMX: 64 to 256 at 40 x 40 479 and 395; 128 to 512 at 20 x 20 290 and
256; 1024 to 256 at 10 x 10 612 and 445; 2048 to 512 at 5 x 5 1374 and 605.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import known_shape
from torchkiln.graph.insertion import SizeArguments, insert_call
from torchkiln.graph.strides import keep_output_strides, returned_values, settle_strides
from torchkiln.passes.joint.convolution_matmuls import as_image, image_of_product, may_be_product, pixels
from torchkiln.passes.joint.convolutions import (
    Convolution,
    convolutions,
    has_channels_last,
    is_of_one_pixel,
    replace_results,
)
from torchkiln.target import Target

_aten = torch.ops.aten


def multiply_pixels(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    promised = returned_values(graph)
    sizes = SizeArguments(graph)
    replaced: dict[torch.fx.Node, Any] = {}  # each result, with the value its readers knew
    for convolution in convolutions(graph):
        if not _is_product(convolution, target):
            continue
        if convolution.gradient is None:
            _forward(convolution, sizes, replaced)
        else:
            _backward(convolution, convolution.gradient, sizes, replaced)
    if replaced:
        settle_strides(graph, replaced)
        keep_output_strides(graph, promised)
    return bool(replaced)


def _is_product(convolution: Convolution, target: Target) -> bool:
    if not may_be_product(convolution, target) or not is_of_one_pixel(convolution):
        return False
    return all(map(has_channels_last, convolution.tensors))


def _forward(convolution: Convolution, sizes: SizeArguments, replaced: dict[torch.fx.Node, Any]) -> None:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    _, inputs, *_ = known_shape(weight.meta["val"])
    rows = pixels(node, image, inputs)
    result = image_of_product(node, rows, _matrix(node, weight), convolution.bias, image, sizes)
    replaced[result] = node.meta["val"]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _backward(
    convolution: Convolution, gradient: torch.fx.Node, sizes: SizeArguments, replaced: dict[torch.fx.Node, Any]
) -> None:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    outputs, inputs, *_ = known_shape(weight.meta["val"])
    rows = pixels(node, gradient, outputs)
    results: dict[int, torch.fx.Node] = {}
    of_image, of_weight, of_bias = convolution.wanted
    known = convolution.result(0) if of_image else None
    if known is not None:
        product = insert_call(node, _aten.mm.default, rows, _matrix(node, weight))
        results[0] = as_image(node, product, image, inputs, sizes, known.meta["val"])
    if of_weight:
        product = insert_call(node, _aten.mm.default, _transposed(node, rows), pixels(node, image, inputs))
        results[1] = insert_call(node, _aten.view.default, product, list(known_shape(weight.meta["val"])))
    if of_bias:
        results[2] = insert_call(node, _aten.sum.dim_IntList, rows, [0])
    replace_results(convolution, results, replaced)


def _matrix(before: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.view.default, weight, list(known_shape(weight.meta["val"])[:2]))


def _transposed(before: torch.fx.Node, matrix: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.permute.default, matrix, [1, 0])
