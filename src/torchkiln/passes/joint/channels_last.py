"""Convolutions of images on a CPU have their channels innermost, from the first of them to the last.

The library computes convolutions in layouts of its own and converts contiguous images to them and back at every
call; with the channels innermost it reads and writes memory as it is. The change is made once, at the first
convolution, and followed through the graph (:mod:`torchkiln.graph.strides`), so that norms, activations and pooling in
between have the same layout and nothing is converted on the way. Weights are converted too, by a loop of ours: the
library does that slowly.

One thread, float32, batch of 2, how many times as fast: 7 x 7 of 3 channels at 160 x 160 2.0, depthwise 3 x 3 2.1 to
2.4, depthwise 7 x 7 1.2 to 1.5, patches of 4 x 4 1.3, 3 x 3 of 64 to 256 channels 1.0 to 1.1; 3 x 3 of 512 channels at
5 x 5 0.4 with weights as they are and 1.5 with weights converted, but with the conversion no faster, and the backward
0.65.

So it pays where images are large and weights are small. With contiguous images the library converts the elements of
images; with channels last, those of weights larger than 1 x 1 are, and their gradients. An element of a weight counts
as ``_WEIGHT_SHARE`` elements of an image: ResNet-50 at 160 x 160 in batches of 2 has 22 million elements of
images and 11 of weights to convert, and took as long either way in inference (86.8 and 85.9 ms) and longer in training
(343 and 309 ms); MobileNetV2 has 14 and 0.1 and took 11.2 instead of 13.6 ms, in training 61 instead of 79 ms. Weights
of convolutions that become matmuls next (:mod:`~torchkiln.passes.joint.im2col`) are not converted, which leaves 4
million in inference: ResNet-50 took 77 to 79 ms instead of 87 to 89.

Of bfloat16, a contiguous image costs the library far more than a weight costs us to convert (one thread, as above):
1 x 1 of 64 to 256 channels at 40 x 40 2.9 ms and 0.5, 3 x 3 of 256 channels at 10 x 10 1.3 ms and 0.9 with 0.4 to 0.6
for the weights, the pooling after the first convolution 10.8 ms and 0.9. So an element of a weight counts as one of an
image: ResNet-50 took 39 ms instead of 64, and in training as long as before (246 and 247 ms).

Weights of inference are converted when they change (:mod:`torchkiln.partition.hoisting`) and count nothing. Blocks of
ResNet whose weights outweigh their images (one thread, AMD Zen 4, contiguous and channels last, ms):

| block | float32 | bfloat16 |
|---|---|---|
| three bottlenecks of 1024 and 256 channels at 14 x 14, batch of 2 | 31.7, 31.0 | 15.6, 15.8 |
| two of 3 x 3, 256 channels at 14 x 14, batch of 2 | 18.2, 17.8 | 9.6, 9.6 |
| two of 3 x 3, 256 channels at 20 x 20 | 39.3, 34.6 | 9.8, 9.8 |
| one of 3 x 3, 512 channels at 24 x 24 | 56.2, 53.9 | 28.1, 26.4 |

Sizes of images may be symbolic: their hints decide whether it pays, and a layout counts as channels last where its
strides say so for all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.fx

from torchkiln.graph.fake import computing_with, fake_mode_of, size_hint
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values
from torchkiln.graph.weights import weight_values
from torchkiln.passes.joint.convolutions import Convolution, convolutions, has_channels_last
from torchkiln.passes.joint.im2col import takes_im2col
from torchkiln.target import Target

_aten = torch.ops.aten

_WEIGHT_SHARE = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 4}


def put_channels_last(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    found = list(convolutions(graph))
    mode = fake_mode_of(graph)
    if mode is None or not _pays(found, weight_values(graph), target):
        return False
    promised = returned_values(graph)
    copied: dict[bool, dict[torch.fx.Node, torch.fx.Node]] = {False: {}, True: {}}
    # In graph order: once one convolution has its channels last, what it gives the next one mostly has too.
    for convolution in sorted(found, key=lambda c: c.node):
        node = convolution.node
        contiguous = _to_convert(convolution, target)
        if not contiguous:
            continue
        # Backward makes copies of its own, of what is saved anyway: those of forward would have to be saved too.
        backward = convolution.gradient is not None
        copies = copied[backward]
        for source in contiguous:
            if source not in copies:
                copies[source] = insert_call(node, _aten.clone.default, source, memory_format=torch.channels_last)
                copies[source].meta["partitioner_tag"] = "must_be_in_backward" if backward else "is_forward"
        node.args = torch.fx.map_arg(node.args, lambda source: copies.get(source, source))  # noqa: B023 (called here)
        before = node.meta["val"]
        assert callable(node.target)
        with computing_with(mode):
            node.meta["val"] = node.target(*torch.fx.map_arg(node.args, lambda source: source.meta["val"]))
        propagate_strides(graph, {node: before})
    changed = any(copied.values())
    if changed:
        keep_output_strides(graph, promised)
    return changed


def _pays(found: Iterable[Convolution], prepared: Collection[torch.fx.Node], target: Target) -> bool:
    """Whether to convert; the weights ``prepared`` are converted when they change, and not at each call."""
    images, weights = 0, dict[torch.fx.Node, int]()
    for convolution in found:
        if convolution.gradient is None:
            images += _elements(convolution.image) + _elements(convolution.node)
        if convolution.weight not in prepared and convolution.weight in _to_convert(convolution, target):
            share = _WEIGHT_SHARE[convolution.weight.meta["val"].dtype]
            weights[convolution.weight] = share * _elements(convolution.weight)
    return images > sum(weights.values())


def _to_convert(convolution: Convolution, target: Target) -> list[torch.fx.Node]:
    """The tensors of a convolution to convert: a matmul will read its weight as it is."""
    kept = convolution.weight if takes_im2col(convolution, target) else None
    return [tensor for tensor in convolution.tensors if tensor is not kept and not has_channels_last(tensor)]


def _elements(node: torch.fx.Node) -> int:
    return math.prod(map(size_hint, node.meta["val"].shape))
