"""Convolutions of inference as calls of oneDNN that are given their weight in the library's own layout.

Without that the library converts the weight at every call, or has to work in a layout it was not written for. Weights
are packed when they change, and images have their channels last, as the library returns them: one that has not is
converted by a loop of ours, the others follow (:mod:`torchkiln.graph.strides`).

One thread, AMD Zen 4, microseconds for channels-last images: with the weight converted to channels last once and for
all, packed, and as a matmul by BLAS (for windows of 3 x 3 without the time of im2col):

| channels, height, window, batch | float32 | bfloat16 |
|---|---|---|
| 3 to 64, 224, 7 x 7 by 2, 1 | 2511, 2497, 6750 | 1595, 1528, 1547 |
| 64 to 64, 56, 3 x 3, 1 | 2318, 2224, 3341 | 1124, 1100, 1311 |
| 256 to 256, 14, 3 x 3, 1 | 2580, 2052, 4395 | 1260, 1056, 1317 |
| 512 to 512, 7, 3 x 3, 1 | 3552, 1985, 3095 | 1860, 1081, 1666 |
| 512 to 512, 7, 3 x 3, 8 | 20253, 16757, 26865 | 12244, 11392, 13359 |
| 256 to 64, 56, 1 x 1, 1 | 1200, 1126, 1196 | 525, 530, 526 |
| 1024 to 256, 14, 1 x 1, 1 | 1085, 1021, 1112 | 792, 523, 547 |
| 2048 to 512, 7, 1 x 1, 1 | 1316, 1124, 1298 | 2050, 624, 716 |
| 96 of 96 groups, 56, 3 x 3, 1 | 102, 93 | 112, 104 |

Packed is the fastest in all of them but for noise, so every convolution whose weight may be packed is. Other shapes:

| | eager | packed |
|---|---|---|
| volumes: 16 to 32, 16 x 28 x 28, 3 x 3 x 3 | 40985 | 11805 |
| sequences: 1 to 512, 16000, 10 by 5 | 8047 | 1003 |
| sequences: 768 of 16 groups, 49, 128 | 21917 | 3121 |
| transposed: 64 to 32, 28, 4 x 4 by 2, 2 | 1463 | 1071 |
| transposed: 256 to 128, 14, 2 x 2 by 2, 2 | 2589 | 1146 |

Nothing here is about one vendor: on any processor the library chooses the layout for it, and which dtypes it packs the
target knows. Sizes of images may be symbolic; the layout is chosen for those of the example, and right for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import (
    computing_with,
    fake_mode_of,
    has_hint,
    has_one_dtype,
    is_channels_last,
    is_symbolic,
    size_hint,
)
from torchkiln.graph.fake_kernels import empty_channels_last
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.nodes import calls_of, fake_tensor, replace
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values
from torchkiln.graph.weights import is_larger_than_its_weights, weight_values
from torchkiln.passes.freezing.onednn.calls import NOT_PACKED, OPERATORS
from torchkiln.target import Target

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Convolution:
    """A convolution to pack. All its geometry has as many numbers as the weight has dimensions of space."""

    node: torch.fx.Node
    image: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def pack_convolutions(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    mode = fake_mode_of(graph)
    calls = calls_of(graph, _aten.convolution.default)
    if mode is None or not calls or not target.packs:
        return False
    constant = weight_values(graph)
    promised = returned_values(graph)
    packing = _Packing(graph)
    # In graph order: what a packed convolution gives the next one mostly has its channels last.
    for node in calls:
        found = _read(node, constant, target)
        if isinstance(found, str):
            node.meta[NOT_PACKED] = found
        else:
            packing.pack(found)
    if packing.changed:
        keep_output_strides(graph, promised)
    return packing.changed


class _Packing:
    """What convolutions of one graph share: packed weights, converted images, and what is known of strides."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.changed = False
        self._graph = graph
        self._packed: dict[Hashable, torch.fx.Node] = {}
        self._converted: dict[torch.fx.Node, torch.fx.Node] = {}
        self._results: dict[Hashable, Hashable] = {}

    def pack(self, convolution: _Convolution) -> None:
        node, before = convolution.node, convolution.node.meta["val"]
        if before.dim() == 3:
            convolution = _as_image(convolution)
        image = self._channels_last(node, convolution.image)
        packed = self._packed_weight(convolution)
        geometry = [convolution.padding, convolution.stride, convolution.dilation, convolution.groups]
        if convolution.transposed:
            geometry.insert(1, convolution.output_padding)
        called = OPERATORS.convolution_transpose if convolution.transposed else OPERATORS.convolution
        arguments = (image, packed, convolution.bias, *geometry, "none", [], "")
        made = insert_known(node, _result(convolution), called, *arguments)
        if before.dim() == 3:
            made = insert_call(node, _aten.squeeze.dim, made, 2)
        replace(node, made)
        propagate_strides(self._graph, {made: before}, self._results)
        self.changed = True

    def _channels_last(self, node: torch.fx.Node, image: torch.fx.Node) -> torch.fx.Node:
        value = image.meta["val"]
        if is_channels_last(value):
            return image
        if image not in self._converted:
            layout = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
            self._converted[image] = insert_call(node, _aten.clone.default, image, memory_format=layout)
        return self._converted[image]

    def _packed_weight(self, convolution: _Convolution) -> torch.fx.Node:
        """The weight as the library wants it for images of the example's size; once for calls that want the same."""
        weight, node = convolution.weight, convolution.node
        sizes = [size_hint(size) for size in convolution.image.meta["val"].shape]
        layout: list[Any] = [convolution.padding, convolution.stride, convolution.dilation, convolution.groups, sizes]
        if convolution.transposed:
            layout.insert(1, convolution.output_padding)
        key = (weight, convolution.transposed, str(layout))
        if key not in self._packed:
            packs = OPERATORS.pack_transposed if convolution.transposed else OPERATORS.pack_convolution
            self._packed[key] = insert_call(node, packs, weight, *layout)
        return self._packed[key]


def _read(node: torch.fx.Node, constant: frozenset[torch.fx.Node], target: Target) -> _Convolution | str:
    """The convolution to pack, or why it is not packed."""
    arguments: Any = node.args
    image, weight, bias, stride, padding, dilation, transposed, output_padding, groups = arguments
    value, result, window = fake_tensor(image), fake_tensor(node), fake_tensor(weight)
    if value is None or result is None or window is None or value.device.type != "cpu":
        return "it is not computed on the CPU"
    if weight not in constant or image in constant:
        return "its weight is computed at each call"
    if not has_one_dtype(node) or not target.packs_weights_of(window.dtype):
        return f"weights of {window.dtype} are not packed on this machine"
    if is_larger_than_its_weights(weight):
        return "the weight is kept in a smaller dtype"
    space = window.dim() - 2
    if value.dim() != window.dim() or space not in ((1, 2) if transposed else (1, 2, 3)):
        return "the library does not pack weights of so many dimensions"
    if not all(map(_has_elements, (value, result, window))):
        return "it may have no elements"
    geometry = (_each(stride, space), _each(padding, space), _each(dilation, space))
    more = _each(output_padding, space) if transposed else [0] * space
    # Negative padding crops.
    if min(geometry[1]) < 0 or any(rest >= step for rest, step in zip(more, geometry[0], strict=True)):
        return "the library has no such padding"
    return _Convolution(node, image, weight, bias, *geometry, transposed, more, groups)


def _each(given: Sequence[int], space: int) -> list[int]:
    """A number for each dimension of space; torch takes one for all of them too."""
    return [given[0]] * space if len(given) == 1 else list(given)


def _has_elements(value: torch.Tensor) -> bool:
    """Whether there are elements, as far as known; sizes that depend on data may turn out to be 0."""
    return all(map(has_hint, value.shape)) and (is_symbolic(value) or value.numel() > 0)


def _as_image(convolution: _Convolution) -> _Convolution:
    """A convolution of sequences as one of images of one row."""
    node = convolution.node
    image, weight = (insert_call(node, _aten.unsqueeze.default, x, 2) for x in (convolution.image, convolution.weight))
    return _Convolution(
        node,
        image,
        weight,
        convolution.bias,
        stride=[1, *convolution.stride],
        padding=[0, *convolution.padding],
        dilation=[1, *convolution.dilation],
        transposed=convolution.transposed,
        output_padding=[0, *convolution.output_padding],
        groups=convolution.groups,
    )


def _result(convolution: _Convolution) -> torch.Tensor:
    """The fake result: of the sizes that torch knew, with channels last."""
    known: torch.Tensor = convolution.node.meta["val"]
    if known.dim() != 3 and is_channels_last(known) and not is_symbolic(known):
        return known
    images, channels, *sizes = known.shape
    mode = fake_mode_of(convolution.node.graph)
    assert mode is not None
    with computing_with(mode):
        return empty_channels_last(known, (images, channels, *([1] if known.dim() == 3 else []), *sizes))
