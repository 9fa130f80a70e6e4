"""Convolutions of 1 x 1 with the channels innermost as matmuls of pixels and channels.

The library for convolutions converts weights to a layout of its own at every call; the one for matmuls reads them as
they are. An image with its channels last is a matrix already, with a pixel in each row, so that nothing is copied.

One thread, float32, batch of 2, microseconds for convolution and matmul: 64 to 256 channels at 40 x 40 943 and 690;
16 to 96 at 80 x 80 618 and 353; 512 to 1024 at 10 x 10 1650 and 1386; 2048 to 512 at 5 x 5 1357 and 972; at worst 172
and 131, so it is done always. Of bfloat16, with AMX: 64 to 256 at 40 x 40 479 and 395; 128 to 512 at 20 x 20 290 and
256; 1024 to 256 at 10 x 10 612 and 445; 2048 to 512 at 5 x 5 1374 and 605.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import static_shape
from torchkiln.graph.insertion import SizeArguments, insert_call
from torchkiln.graph.nodes import replace
from torchkiln.passes.joint.convolution_matmuls import as_image, matmul_as_image, may_be_matmul, pixel_rows
from torchkiln.passes.joint.convolutions import (
    Convolution,
    has_channels_last,
    is_pointwise,
    replace_gradients,
    rewrite_convolutions,
)
from torchkiln.target import Target

_aten = torch.ops.aten


def replace_pointwise_convolutions(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    sizes = SizeArguments(graph_module.graph)

    def rewrite(convolution: Convolution, replaced: dict[torch.fx.Node, Any]) -> None:
        if not may_be_matmul(convolution, target) or not is_pointwise(convolution):
            return
        if not all(map(has_channels_last, convolution.tensors)):
            return
        if convolution.gradient is None:
            result = _forward(convolution, sizes)
            replaced[result] = convolution.node.meta["val"]
            replace(convolution.node, result)
        else:
            replace_gradients(convolution, _backward(convolution, convolution.gradient, sizes), replaced)

    return rewrite_convolutions(graph_module.graph, rewrite)


def _forward(convolution: Convolution, sizes: SizeArguments) -> torch.fx.Node:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    rows = pixel_rows(node, image, static_shape(weight.meta["val"])[1])
    return matmul_as_image(node, rows, _matrix(node, weight), convolution.bias, image, sizes)


def _backward(convolution: Convolution, gradient: torch.fx.Node, sizes: SizeArguments) -> dict[int, torch.fx.Node]:
    """The gradients that are read, by their index."""
    node, image, weight = convolution.node, convolution.image, convolution.weight
    shape = static_shape(weight.meta["val"])
    outputs, inputs, *_ = shape
    rows = pixel_rows(node, gradient, outputs)
    results: dict[int, torch.fx.Node] = {}
    of_image, of_weight, of_bias = convolution.wanted
    known = convolution.result(0) if of_image else None
    if known is not None:
        matmul = insert_call(node, _aten.mm.default, rows, _matrix(node, weight))
        results[0] = as_image(node, matmul, image, inputs, sizes, known.meta["val"])
    if of_weight:
        transposed = insert_call(node, _aten.permute.default, rows, [1, 0])
        matmul = insert_call(node, _aten.mm.default, transposed, pixel_rows(node, image, inputs))
        results[1] = insert_call(node, _aten.view.default, matmul, list(shape))
    if of_bias:
        results[2] = insert_call(node, _aten.sum.dim_IntList, rows, [0])
    return results


def _matrix(before: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.view.default, weight, list(static_shape(weight.meta["val"])[:2]))
