"""The gradient of the weight of a large depthwise convolution, as loops of ours.

Each element of it is a sum over all pixels of the product of the gradient and the image, moved by the place of the
element in the window. The library needs seven to a hundred times as long for it as for the convolution itself where the
window is larger than 3 x 3. One thread, batch of 2, 7 x 7, milliseconds of the library and of these loops: 96 channels
at 40 x 40 4.7 and 1.6, 192 at 20 x 20 3.9 and 1.1, 384 at 10 x 10 3.0 and 0.7, 768 at 5 x 5 20.7 and 0.6; of 3 x 3,
144 channels at 40 x 40 0.46 and 0.85. So it is done for the larger windows.

Lines of pixels are summed first and then their sums, so that what the places of the window share is still in the cache:
in one sum, the first of these takes 4.4 ms.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import is_symbolic, static_shape
from torchkiln.graph.insertion import insert_call
from torchkiln.passes.joint.convolutions import (
    Convolution,
    has_channels_last,
    replace_gradients,
    rewrite_convolutions,
)

_aten = torch.ops.aten

_LARGEST_OF_LIBRARY = 9  # elements of a window


def sum_depthwise_gradients(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_convolutions(graph_module.graph, _rewrite)


def _rewrite(convolution: Convolution, replaced: dict[torch.fx.Node, Any]) -> None:
    """Replace a backward by one without the gradients of weight and bias, and these."""
    node, gradient = convolution.node, convolution.gradient
    if gradient is None or not _is_large_depthwise(convolution, gradient):
        return
    of_image, _, of_bias = convolution.wanted
    results = {1: _weight_gradient(convolution, gradient)}
    if of_image:
        target = _aten.convolution_backward.default
        rest = insert_call(node, target, *node.args[:10], [True, False, False])
        results[0] = insert_call(node, operator.getitem, rest, 0)
    if of_bias:
        results[2] = insert_call(node, _aten.sum.dim_IntList, gradient, [0, 2, 3])
    replace_gradients(convolution, results, replaced)


def _is_large_depthwise(convolution: Convolution, gradient: torch.fx.Node) -> bool:
    weight: torch.Tensor = convolution.weight.meta["val"]
    if any(is_symbolic(tensor.meta["val"]) for tensor in convolution.tensors):  # windows are as large as the gradient
        return False
    (outputs, per_group, *window), groups = static_shape(weight), convolution.groups
    if per_group != 1 or outputs != groups or not convolution.wanted[1] or math.prod(window) <= _LARGEST_OF_LIBRARY:
        return False
    if convolution.stride != (1, 1) or convolution.dilation != (1, 1):
        return False
    return has_channels_last(gradient) and has_channels_last(convolution.image)


def _weight_gradient(convolution: Convolution, gradient: torch.fx.Node) -> torch.fx.Node:
    image, dtype = convolution.image, convolution.weight.meta["val"].dtype
    call = partial(insert_call, convolution.node)
    above, left = convolution.padding
    height, width = static_shape(gradient.meta["val"])[2:]
    if dtype != torch.float32:
        gradient, image = (call(_aten._to_copy.default, t, dtype=torch.float32) for t in (gradient, image))
    padded = call(_aten.constant_pad_nd.default, image, [left, left, above, above])
    windows = call(_aten.unfold.default, call(_aten.unfold.default, padded, 2, height, 1), 3, width, 1)
    pixels = call(_aten.unsqueeze.default, call(_aten.unsqueeze.default, gradient, 2), 3)
    terms = call(_aten.mul.Tensor, pixels, windows)  # image, channel, place in the window, pixel
    lines = call(_aten.sum.dim_IntList, call(_aten.permute.default, terms, [4, 2, 3, 1, 0, 5]), [4, 5])
    total = call(_aten.sum.dim_IntList, lines, [0])
    result = call(_aten.unsqueeze.default, call(_aten.permute.default, total, [2, 0, 1]), 1)
    if dtype != torch.float32:
        result = call(_aten._to_copy.default, result, dtype=dtype)
    return result
