"""Convolutions whose results have more channels than pixels, as matmuls by im2col.

The library for convolutions converts weights to a layout of its own at every call; the one for matmuls reads them as
they are. For that, im2col writes a matrix with a row for each pixel of the result and a column for each weight of a
channel. It is smaller than the weights where there are fewer pixels than channels.

One thread, batch of 2, microseconds of the convolution with contiguous images, with channels last without the time to
convert its weights, and of the matmul, without the 0.1 to 0.4 ms of im2col:

| channels, height, window, stride | channels to pixels | float32 | bfloat16, with AMX |
|---|---|---|---|
| 512 to 512, 5, 3 x 3, 1 | 10 | 3331, 3411, 2533 | 3261, 2319, 1390 |
| 512 to 512, 10, 3 x 3, 2 | 10 | 2995, 3339, 2271 | 4010, 2923, 1113 |
| 1024 to 2048, 10, 1 x 1, 2 | 41 | | 3526, 3071, 1390 |
| 256 to 256, 10, 3 x 3, 1 | 1.3 | 1780, 1733, 1772 | 1292, 934, 1066 |
| 256 to 256, 20, 3 x 3, 2 | 1.3 | 1954, 1825, 1750 | 1799, 1345, 1147 |
| 128 to 128, 20, 3 x 3, 1 | 0.2 | 1599, 1468, 1563 | 865, 333, 337 |

On AMD's processors the convolution is nearer to the matmul, with im2col now (one thread of a Zen 5, compiled, the
weight not converted before, microseconds of eager and so):

| channels, height, window, batch | channels to pixels | float32 | bfloat16 |
|---|---|---|---|
| 512 to 512, 5, 3 x 3, 2 | 10 | 2633, 1475 | 1705, 651 |
| 256 to 512, 7, 3 x 3, 8 | 1.3 | 3947, 4481 | 2007, 2332 |

So there are to be twice as many channels as pixels there.

The gradients stay the library's, so that in training its layouts decide. A matmul between contiguous images would have
them permuted around it, so it is made only where the channels are last.

Symbolic sizes are taken for those of the example; the matrix of im2col grows with the images. Zeros of the padding are
multiplied too: a weight that is infinite gives NaN there, where the other library skips them in float32 (512 to 512
channels, 5 x 5: no NaN in eager, nine here; in bfloat16 nine in both).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import has_hint, size_hint, static_shape
from torchkiln.graph.insertion import SizeArguments, insert_call
from torchkiln.graph.nodes import replace
from torchkiln.passes.joint.convolution_matmuls import matmul_as_image, may_be_matmul
from torchkiln.passes.joint.convolutions import Convolution, has_channels_last, is_pointwise, rewrite_convolutions
from torchkiln.target import Target

_aten = torch.ops.aten


def apply_im2col(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    sizes = SizeArguments(graph_module.graph)

    def rewrite(convolution: Convolution, replaced: dict[torch.fx.Node, Any]) -> None:
        if takes_im2col(convolution, target) and has_channels_last(convolution.image):
            result = _im2col(convolution, sizes)
            replaced[result] = convolution.node.meta["val"]
            replace(convolution.node, result)

    return rewrite_convolutions(graph_module.graph, rewrite)


def takes_im2col(convolution: Convolution, target: Target) -> bool:
    """Whether a convolution becomes a matmul where its image has the channels last."""
    weight: torch.Tensor = convolution.weight.meta["val"]
    if convolution.gradient is not None or not may_be_matmul(convolution, target) or is_pointwise(convolution):
        return False
    if convolution.groups != 1 or convolution.dilation != (1, 1):
        return False
    if not (weight.is_contiguous() or has_channels_last(convolution.weight)):
        return False
    images, _, height, width = convolution.node.meta["val"].shape
    if not all(map(has_hint, (images, height, width))):
        return False
    pixels = size_hint(images) * size_hint(height) * size_hint(width)
    return static_shape(weight)[0] > pixels * (2 if target.is_amd else 1)


def _im2col(convolution: Convolution, sizes: SizeArguments) -> torch.fx.Node:
    node, image, weight = convolution.node, convolution.image, convolution.weight
    shape = static_shape(weight.meta["val"])
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
    permuted = insert_call(node, _aten.permute.default, windows, order)
    copied = insert_call(node, _aten.clone.default, permuted, memory_format=torch.contiguous_format)
    columns = math.prod(shape[1:])
    rows = insert_call(node, _aten.view.default, copied, [-1, columns])
    matrix = insert_call(node, _aten.view.default, weight, [shape[0], columns])
    return matmul_as_image(node, rows, matrix, convolution.bias, windows, sizes)
