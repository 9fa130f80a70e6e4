"""Convolutions of images have their channels innermost, from the first of them to the last.

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

The change costs conversions too: of images that come from elsewhere, and of results that go elsewhere in eager's
layout. One that is part of a kernel of ours costs half. One convolution alone has as many of them as the library
itself. One thread, AMD Zen 5, batch of 8, microseconds of eager and with the channels last between two conversions of
ours; with a permuted image the library copies it first:

| convolution | float32 | permuted | bfloat16 | permuted |
|---|---|---|---|---|
| depthwise 3 x 3, 64 channels at 56 x 56 | 612, 734 | 1567, 1098 | 1011, 354 | 1402, 418 |
| the same and its gradients | 3595, 3887 | 4784, 4242 | 3053, 1528 | 4083, 2127 |
| 3 x 3, 64 to 64 channels at 56 x 56 | 8210, 8377 | 9020, 8579 | 4390, 4226 | 4833, 4201 |
| 7 x 7 by 2, 3 to 64 channels at 112 x 112 | 2064, 2207 | 2155, 2498 | 1658, 1536 | 1757, 1533 |

An image without neighbours along memory, of every second pixel, is gathered channel by channel: that takes
``_GATHERED`` elements of the library's, in either type. One thread, AMD Zen 4, as above with every second pixel,
microseconds of eager and with the channels last: depthwise 2880, 3680 and with gradients 8460, 10530, bfloat16 1940,
2010 and 5590, 6620.

On AMD's processors a 1 x 1 convolution in float32 reads contiguous images as they are: 64 to 64 channels at 56 x 56
take 3.06 ms contiguous, 2.90 with channels last and 2.86 as a matmul of MKL's (Zen 4). So nothing is saved but the
copy of a permuted image (permuted 3.83 ms in eager and 5.00 between conversions, with gradients 11.4 and 13.4). In
inference it is a matmul of oneDNN's next where the target has these
(:mod:`~torchkiln.passes.post_grad.onednn_matmuls`), and one of MKL's in eager: 64 to 128 channels at 56 x 56 take 4.1
and 3.1 ms with both conversions. So each result counts once more for every ``_CHANNELS_OF_A_CONVERSION`` channels. In
training most stay MKL's: with gradients, 64 to 64 channels took 8.4 ms in eager and 10.6 between conversions (Zen 5).

On a card the same is done where all convolutions are of half precision and none is in groups: tensor cores take
channels side by side, and cuDNN copies contiguous images to that layout and back. What it gains there is not measured
yet, so the elements are weighed as those of bfloat16 are on a CPU.

Sizes of images may be symbolic: their hints decide whether it pays, and a layout counts as channels last where its
strides say so for all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
import torch.fx

from torchkiln.graph.fake import computing_with, fake_mode_of, is_row_major, size_hint, static_shape
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import fake_tensor
from torchkiln.graph.operators import becomes_loop
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_nodes, returned_values
from torchkiln.graph.weights import weight_values
from torchkiln.passes.joint.convolutions import Convolution, convolutions, has_channels_last, is_pointwise
from torchkiln.passes.joint.im2col import takes_im2col
from torchkiln.target import Target

_aten = torch.ops.aten

_WEIGHT_SHARE = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 4}
# Of an element that a loop of ours converts, as many as the library does in that time.
_OWN_SHARE = {torch.float32: 1.2, torch.bfloat16: 0.5, torch.float16: 1.2}
# The same of an element that is gathered.
_GATHERED = 3.0
# Channels whose multiplications cost as much more by MKL than by oneDNN as an element costs to convert.
_CHANNELS_OF_A_CONVERSION = 16


def put_channels_last(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    found = list(convolutions(graph)) or _on_card(graph)
    mode = fake_mode_of(graph)
    if mode is None or not _pays(graph, found, weight_values(graph), target):
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


def _on_card(graph: torch.fx.Graph) -> list[Convolution]:
    """The convolutions of a card, where its tensor cores compute all of them."""
    found = list(convolutions(graph, "cuda"))
    plain = all(c.groups == 1 and c.image.meta["val"].dtype != torch.float32 for c in found)
    return found if plain else []


def _pays(
    graph: torch.fx.Graph, found: Sequence[Convolution], prepared: Collection[torch.fx.Node], target: Target
) -> bool:
    """Whether to convert; the weights ``prepared`` are converted when they change, and not at each call."""
    saved, weights = 0.0, dict[torch.fx.Node, int]()
    trains = any(convolution.gradient is not None for convolution in found)
    for convolution in found:
        if convolution.gradient is None:
            saved += _saved(convolution, target, trains=trains)
        if convolution.weight not in prepared and convolution.weight in _to_convert(convolution, target):
            share = _weight_share(convolution.weight.meta["val"])
            weights[convolution.weight] = share * _elements(convolution.weight)
    spent = sum(weights.values())
    return saved > spent and saved > spent + _own_conversions(graph, found)


def _weight_share(weight: torch.Tensor) -> int:
    return _WEIGHT_SHARE[weight.dtype] if weight.device.type == "cpu" else 1


def _saved(convolution: Convolution, target: Target, *, trains: bool) -> float:
    """What the library does not convert of a convolution with channels last, in elements."""
    image, result = _elements(convolution.image), _elements(convolution.node)
    weight: torch.Tensor = convolution.weight.meta["val"]
    is_matmul = weight.device.type == "cpu" and weight.dtype == torch.float32 and is_pointwise(convolution)
    saved = 0.0 if is_matmul and target.is_amd else float(image + result)
    if not has_channels_last(convolution.image) and not is_row_major(convolution.image.meta["val"]):
        saved += image  # which the library copies first
    if is_matmul and not trains and target.multiplies_by_onednn:
        saved += image + result + result * static_shape(weight)[1] / _CHANNELS_OF_A_CONVERSION
    return saved


def _own_conversions(graph: torch.fx.Graph, found: Sequence[Convolution]) -> float:
    """What loops of ours convert of forward: images that no convolution gave, and results that leave the graph.

    Backward has as many of them, and as many that are saved.
    """
    forward = [convolution for convolution in found if convolution.gradient is None]
    following = _following(graph, forward)
    entering = {c.image for c in forward if c.image not in following and not has_channels_last(c.image)}
    leaving = {node for node in returned_nodes(graph) if node in following and _is_other_image(node)}
    total = 0.0
    for image in entering | leaving:
        value: torch.Tensor = image.meta["val"]
        share = _OWN_SHARE[value.dtype] if _has_neighbours(value) else _GATHERED
        total += share * _elements(image) * (0.5 if becomes_loop(image) else 1.0)
    return total


def _has_neighbours(image: torch.Tensor) -> bool:
    """Whether elements along some dimension lie side by side, so that tiles are transposed and nothing is gathered."""
    return any(isinstance(stride, int) and stride == 1 for stride in image.stride())


def _following(graph: torch.fx.Graph, forward: Sequence[Convolution]) -> set[torch.fx.Node]:
    """Results of convolutions, and what is as they are: values of four dimensions computed from these."""
    following = {convolution.node for convolution in forward}
    for node in graph.nodes:
        if node not in following and not following.isdisjoint(node.all_input_nodes):
            value = node.meta.get("val")
            first = value[0] if isinstance(value, (tuple, list)) and value else value
            if isinstance(first, torch.Tensor) and first.dim() == 4:
                following.add(node)
    return following


def _is_other_image(node: torch.fx.Node) -> bool:
    """Whether a returned image has its channels anywhere but last."""
    value = fake_tensor(node)
    return value is not None and value.dim() == 4 and value.dtype in _OWN_SHARE and not has_channels_last(node)


def _to_convert(convolution: Convolution, target: Target) -> list[torch.fx.Node]:
    """The tensors of a convolution to convert: a matmul will read its weight as it is."""
    on_cpu = convolution.image.meta["val"].device.type == "cpu"
    kept = convolution.weight if on_cpu and takes_im2col(convolution, target) else None
    return [tensor for tensor in convolution.tensors if tensor is not kept and not has_channels_last(tensor)]


def _elements(node: torch.fx.Node) -> int:
    return math.prod(map(size_hint, node.meta["val"].shape))
