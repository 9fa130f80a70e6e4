"""Convolutions of images on a CPU and their gradients, as the passes about them read them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import is_symbolic

_aten = torch.ops.aten
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Convolution:
    """A call of ``convolution``, or of ``convolution_backward`` where ``gradient`` is not None.

    Its tensors have four dimensions, known sizes, elements, and one of the types the library has code for. ``wanted``
    says which of the gradients of image, weight and bias are read.
    """

    node: torch.fx.Node
    gradient: torch.fx.Node | None
    image: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    wanted: tuple[bool, bool, bool]

    @property
    def tensors(self) -> tuple[torch.fx.Node, ...]:
        return (self.image, self.weight) if self.gradient is None else (self.gradient, self.image, self.weight)


def convolutions(graph: torch.fx.Graph) -> Iterator[Convolution]:
    """Those of images that are not transposed, then those of gradients.

    Each is read when it is asked for, so that the caller may replace those before it, which it may read.
    """
    for target in (_aten.convolution.default, _aten.convolution_backward.default):
        for node in graph.find_nodes(op="call_function", target=target):
            found = _read(node)
            if found is not None:
                yield found


def _read(node: torch.fx.Node) -> Convolution | None:
    arguments: list[Any] = list(node.args)
    backward = node.target is _aten.convolution_backward.default
    gradient = arguments.pop(0) if backward else None
    image, weight, bias, stride, padding, dilation, transposed, _, groups, *rest = arguments
    values = [t.meta.get("val") for t in (image, weight, *([gradient] if backward else []))]
    if transposed or not all(isinstance(v, torch.Tensor) and _is_image(v) for v in values):
        return None
    if backward and not all(user.target is operator.getitem for user in node.users):
        return None
    wanted = tuple(rest[0]) if backward else (False, False, False)
    geometry = tuple(stride), tuple(padding), tuple(dilation)
    return Convolution(node, gradient, image, weight, None if backward else bias, *geometry, groups, wanted)


def _is_image(value: torch.Tensor) -> bool:
    if value.dim() != 4 or value.dtype not in _TYPES or value.layout is not torch.strided:
        return False
    return value.device.type == "cpu" and not is_symbolic(value) and value.numel() > 0


def has_channels_last(node: torch.fx.Node) -> bool:
    """Whether the channels of an image lie next to each other; a weight of 1 x 1 has it either way."""
    value: torch.Tensor = node.meta["val"]
    return value.is_contiguous(memory_format=torch.channels_last)


def replace_results(
    convolution: Convolution, results: dict[int, torch.fx.Node], replaced: dict[torch.fx.Node, Any]
) -> None:
    """Give readers of a gradient ``results`` instead; ``replaced`` gets these with the values the readers knew."""
    node = convolution.node
    for user in list(node.users):
        position = user.args[1]
        assert isinstance(position, int)
        if position in results:
            replaced[results[position]] = user.meta["val"]
            user.replace_all_uses_with(results[position])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
