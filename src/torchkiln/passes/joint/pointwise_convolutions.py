"""Convolutions of 1 x 1 with the channels innermost are matrix products of pixels and channels.

The library that computes convolutions puts weights into a layout of its own at every call; the one for products reads
them as they are. An image with its channels last is a matrix already, with a pixel in each row, so that nothing is
copied. The bias is added by whatever reads the result, where the library for products would write it first.

One thread, float32, batch of 2, microseconds for convolution and product: 64 to 256 channels at 40 x 40 943 and 690;
16 to 96 at 80 x 80 618 and 353; 512 to 1024 at 10 x 10 1650 and 1386; 2048 to 512 at 5 x 5 1357 and 972; at worst 172
and 131, so it is done always.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.insertion import insert_call
from torchkiln.graph.strides import keep_output_strides, returned_values, settle_strides
from torchkiln.passes.joint.convolutions import Convolution, convolutions, has_channels_last, replace_results

_aten = torch.ops.aten


def multiply_pixels(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    promised = returned_values(graph)
    replaced: dict[torch.fx.Node, Any] = {}  # each result, with the value its readers knew
    for convolution in convolutions(graph):
        if not _is_product(convolution):
            continue
        if convolution.gradient is None:
            _forward(convolution, replaced)
        else:
            _backward(convolution, convolution.gradient, replaced)
    if replaced:
        settle_strides(graph, replaced)
        keep_output_strides(graph, promised)
    return bool(replaced)


def _is_product(convolution: Convolution) -> bool:
    weight: torch.Tensor = convolution.weight.meta["val"]
    if weight.dtype != torch.float32:  # in half precision eager adds the bias before it rounds
        return False
    if tuple(weight.shape[2:]) != (1, 1) or convolution.groups != 1:
        return False
    if convolution.stride != (1, 1) or convolution.padding != (0, 0):
        return False
    return all(map(has_channels_last, convolution.tensors))


def _forward(convolution: Convolution, replaced: dict[torch.fx.Node, Any]) -> None:
    node, bias = convolution.node, convolution.bias
    factors = _pixels(node, convolution.image), _transposed(node, _matrix(node, convolution.weight))
    result = _as_image(node, insert_call(node, _aten.mm.default, *factors), node.meta["val"].shape)
    if bias is not None:
        result = insert_call(node, _aten.add.Tensor, result, insert_call(node, _aten.view.default, bias, [1, -1, 1, 1]))
    replaced[result] = node.meta["val"]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _backward(convolution: Convolution, gradient: torch.fx.Node, replaced: dict[torch.fx.Node, Any]) -> None:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    rows = _pixels(node, gradient)
    results: dict[int, torch.fx.Node] = {}
    of_image, of_weight, of_bias = convolution.wanted
    if of_image:
        product = insert_call(node, _aten.mm.default, rows, _matrix(node, weight))
        results[0] = _as_image(node, product, image.meta["val"].shape)
    if of_weight:
        product = insert_call(node, _aten.mm.default, _transposed(node, rows), _pixels(node, image))
        results[1] = insert_call(node, _aten.view.default, product, list(weight.meta["val"].shape))
    if of_bias:
        results[2] = insert_call(node, _aten.sum.dim_IntList, rows, [0])
    replace_results(convolution, results, replaced)


def _pixels(before: torch.fx.Node, image: torch.fx.Node) -> torch.fx.Node:
    """An image with its channels last as a matrix: a pixel in each row."""
    turned = insert_call(before, _aten.permute.default, image, [0, 2, 3, 1])
    return insert_call(before, _aten.view.default, turned, [-1, image.meta["val"].shape[1]])


def _as_image(before: torch.fx.Node, pixels: torch.fx.Node, shape: torch.Size) -> torch.fx.Node:
    count, channels, height, width = shape
    turned = insert_call(before, _aten.view.default, pixels, [count, height, width, channels])
    return insert_call(before, _aten.permute.default, turned, [0, 3, 1, 2])


def _matrix(before: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.view.default, weight, list(weight.meta["val"].shape[:2]))


def _transposed(before: torch.fx.Node, matrix: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.permute.default, matrix, [1, 0])
