"""Convolutions whose results have more channels than pixels, as products of weights and what the windows cover.

The library that computes convolutions puts weights into a layout of its own at every call; the one for products reads
them as they are. For that, an image has to be written out with a row for each pixel of the result and a column for each
weight of a channel. These are fewer than the weights where there are fewer pixels than channels.

One thread, batch of 2, microseconds of the convolution row by row, with channels last without the time to turn its
weights, and of the product, without the 0.1 to 0.4 ms in which a kernel writes the image out:

| channels, height, window, stride | channels to pixels | float32 | bfloat16, with AMX |
|---|---|---|---|
| 512 to 512, 5, 3 x 3, 1 | 10 | 3331, 3411, 2533 | 3261, 2319, 1390 |
| 512 to 512, 10, 3 x 3, 2 | 10 | 2995, 3339, 2271 | 4010, 2923, 1113 |
| 1024 to 2048, 10, 1 x 1, 2 | 41 | | 3526, 3071, 1390 |
| 256 to 256, 10, 3 x 3, 1 | 1.3 | 1780, 1733, 1772 | 1292, 934, 1066 |
| 256 to 256, 20, 3 x 3, 2 | 1.3 | 1954, 1825, 1750 | 1799, 1345, 1147 |
| 128 to 128, 20, 3 x 3, 1 | 0.2 | 1599, 1468, 1563 | 865, 333, 337 |

The gradients stay the library's, so that in training its layouts decide. A product in the middle of images given row by
row would have them turned around it, so it is made only where the channels are last.

Symbolic sizes are taken for those of the example; what is written out for more images grows as the images do. Zeros of
the padding are multiplied too: a weight that is infinite gives NaN there, where the other library passes over them in
float32 (512 to 512 channels, 5 x 5: no NaN in eager, nine here; in bfloat16 nine in both).
"""

from __future__ import annotations

import math

import torch
import torch.fx

from torchkiln.graph.fake import has_example, known_shape, typical
from torchkiln.graph.insertion import SizeArguments, insert_call
from torchkiln.graph.strides import keep_output_strides, returned_values, settle_strides
from torchkiln.passes.joint.convolution_matmuls import image_of_product, may_be_product
from torchkiln.passes.joint.convolutions import Convolution, convolutions, has_channels_last, is_of_one_pixel
from torchkiln.target import Target

_aten = torch.ops.aten


def unfold_small_images(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    promised = returned_values(graph)
    sizes = SizeArguments(graph)
    changed = False
    for convolution in convolutions(graph):
        if unfolds(convolution, target) and has_channels_last(convolution.image):
            _unfold(convolution, sizes)
            changed = True
    if changed:
        keep_output_strides(graph, promised)
    return changed


def unfolds(convolution: Convolution, target: Target) -> bool:
    """Whether a convolution is one to unfold where its image has the channels last, as the product has them then."""
    weight: torch.Tensor = convolution.weight.meta["val"]
    if convolution.gradient is not None or not may_be_product(convolution, target) or is_of_one_pixel(convolution):
        return False
    if convolution.groups != 1 or convolution.dilation != (1, 1):
        return False
    if not (weight.is_contiguous() or has_channels_last(convolution.weight)):
        return False
    images, _, height, width = convolution.node.meta["val"].shape
    if not all(map(has_example, (images, height, width))):
        return False
    return known_shape(weight)[0] > typical(images) * typical(height) * typical(width)


def _unfold(convolution: Convolution, sizes: SizeArguments) -> None:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    shape = known_shape(weight.meta["val"])
    if convolution.padding != (0, 0):
        high, wide = convolution.padding
        image = insert_call(node, _aten.constant_pad_nd.default, image, [wide, wide, high, high], 0.0)
    windows = image
    for dim, size, step in zip((2, 3), shape[2:], convolution.stride, strict=True):
        windows = insert_call(node, _aten.unfold.default, windows, dim, size, step)
    # The columns in the order in which the weights of a channel lie in memory.
    if weight.meta["val"].is_contiguous():
        order = [0, 2, 3, 1, 4, 5]
    else:
        order = [0, 2, 3, 4, 5, 1]
        weight = insert_call(node, _aten.permute.default, weight, [0, 2, 3, 1])
    turned = insert_call(node, _aten.permute.default, windows, order)
    written = insert_call(node, _aten.clone.default, turned, memory_format=torch.contiguous_format)
    columns = math.prod(shape[1:])
    rows = insert_call(node, _aten.view.default, written, [-1, columns])
    matrix = insert_call(node, _aten.view.default, weight, [shape[0], columns])
    result = image_of_product(node, rows, matrix, convolution.bias, windows, sizes)
    known = node.meta["val"]
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    settle_strides(result.graph, {result: known})
