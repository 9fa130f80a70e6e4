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

from torchkiln.graph.fake import fake_mode_of, known_shape
from torchkiln.graph.insertion import SizeArguments, insert_call, insert_known
from torchkiln.graph.strides import keep_output_strides, returned_values, settle_strides
from torchkiln.passes.joint.convolutions import (
    Convolution,
    convolutions,
    has_channels_last,
    is_channels_last,
    replace_results,
)

_aten = torch.ops.aten


def multiply_pixels(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    promised = returned_values(graph)
    sizes = SizeArguments(graph)
    replaced: dict[torch.fx.Node, Any] = {}  # each result, with the value its readers knew
    for convolution in convolutions(graph):
        if not _is_product(convolution):
            continue
        if convolution.gradient is None:
            _forward(convolution, sizes, replaced)
        else:
            _backward(convolution, convolution.gradient, sizes, replaced)
    if replaced:
        settle_strides(graph, replaced)
        keep_output_strides(graph, promised)
    return bool(replaced)


def _is_product(convolution: Convolution) -> bool:
    weight: torch.Tensor = convolution.weight.meta["val"]
    if weight.dtype != torch.float32:  # in half precision eager adds the bias before it rounds
        return False
    if known_shape(weight)[2:] != (1, 1) or convolution.groups != 1:
        return False
    if convolution.stride != (1, 1) or convolution.padding != (0, 0):
        return False
    return all(map(has_channels_last, convolution.tensors))


def _forward(convolution: Convolution, sizes: SizeArguments, replaced: dict[torch.fx.Node, Any]) -> None:
    node, bias = convolution.node, convolution.bias
    outputs, inputs, *_ = known_shape(convolution.weight.meta["val"])
    factors = _pixels(node, convolution.image, inputs), _transposed(node, _matrix(node, convolution.weight))
    product = insert_call(node, _aten.mm.default, *factors)
    result = _as_image(node, product, convolution.image, outputs, sizes, node.meta["val"])
    if bias is not None:
        result = insert_call(node, _aten.add.Tensor, result, insert_call(node, _aten.view.default, bias, [1, -1, 1, 1]))
    replaced[result] = node.meta["val"]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def _backward(
    convolution: Convolution, gradient: torch.fx.Node, sizes: SizeArguments, replaced: dict[torch.fx.Node, Any]
) -> None:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    outputs, inputs, *_ = known_shape(weight.meta["val"])
    rows = _pixels(node, gradient, outputs)
    results: dict[int, torch.fx.Node] = {}
    of_image, of_weight, of_bias = convolution.wanted
    known = convolution.result(0) if of_image else None
    if known is not None:
        product = insert_call(node, _aten.mm.default, rows, _matrix(node, weight))
        results[0] = _as_image(node, product, image, inputs, sizes, known.meta["val"])
    if of_weight:
        product = insert_call(node, _aten.mm.default, _transposed(node, rows), _pixels(node, image, inputs))
        results[1] = insert_call(node, _aten.view.default, product, list(known_shape(weight.meta["val"])))
    if of_bias:
        results[2] = insert_call(node, _aten.sum.dim_IntList, rows, [0])
    replace_results(convolution, results, replaced)


def _pixels(before: torch.fx.Node, image: torch.fx.Node, channels: int) -> torch.fx.Node:
    """An image with its channels last as a matrix: a pixel in each row."""
    turned = insert_call(before, _aten.permute.default, image, [0, 2, 3, 1])
    return insert_call(before, _aten.view.default, turned, [-1, channels])


def _as_image(
    before: torch.fx.Node,
    pixels: torch.fx.Node,
    like: torch.fx.Node,
    channels: int,
    sizes: SizeArguments,
    known: torch.Tensor,
) -> torch.fx.Node:
    """Rows of pixels as images, as many and as large as those of ``like``; ``known`` is what the library returned."""
    shape = like.meta["val"].shape

    def size(dim: int) -> Any:
        found = sizes.argument(shape[dim], before)
        return insert_call(before, _aten.sym_size.int, like, dim) if found is None else found

    arguments = [size(0), size(2), size(3), channels]
    mode = fake_mode_of(before.graph)
    if mode is None or not is_channels_last(known):
        turned = insert_call(before, _aten.view.default, pixels, arguments)
        return insert_call(before, _aten.permute.default, turned, [0, 3, 1, 2])
    with mode, torch.no_grad():
        value = known.permute(0, 2, 3, 1)
    turned = insert_known(before, value, _aten.view.default, pixels, arguments)
    return insert_known(before, known, _aten.permute.default, turned, [0, 3, 1, 2])


def _matrix(before: torch.fx.Node, weight: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.view.default, weight, list(known_shape(weight.meta["val"])[:2]))


def _transposed(before: torch.fx.Node, matrix: torch.fx.Node) -> torch.fx.Node:
    return insert_call(before, _aten.permute.default, matrix, [1, 0])
