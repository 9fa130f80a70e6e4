"""Convolutions of images and their gradients, as the passes about them read them; those on a CPU unless asked else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import has_one_dtype, is_channels_last, is_symbolic
from torchkiln.graph.nodes import calls_of, fake_tensor
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values

_aten = torch.ops.aten
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Convolution:
    """A call of ``convolution``, or of ``convolution_backward`` where ``gradient`` is not None.

    Its tensors have four dimensions, elements, and one of the types the library has code for. The sizes of the weight
    are known, and with them the channels; others may be symbolic. ``wanted`` says which of the gradients of image,
    weight and bias are read.
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

    def result(self, position: int) -> torch.fx.Node | None:
        """The node of one of the gradients, if there is one."""
        return next((user for user in self.node.users if user.args[1] == position), None)


def convolutions(graph: torch.fx.Graph, device: str = "cpu") -> Iterator[Convolution]:
    """Those of images on a kind of device that are not transposed, then those of gradients.

    Each is read when it is asked for: its operands may be convolutions that the caller has replaced by then.
    """
    for node in calls_of(graph, _aten.convolution.default, _aten.convolution_backward.default):
        found = _read(node, device)
        if found is not None:
            yield found


def _read(node: torch.fx.Node, device: str) -> Convolution | None:
    arguments: list[Any] = list(node.args)
    backward = node.target is _aten.convolution_backward.default
    gradient = arguments.pop(0) if backward else None
    image, weight, bias, stride, padding, dilation, transposed, _, groups, *rest = arguments
    tensors = (image, weight, gradient) if backward else (image, weight)
    if transposed or not all(_is_image(fake_tensor(t), device) for t in tensors) or is_symbolic(weight.meta["val"]):
        return None
    if not has_one_dtype(node):
        return None
    if backward and not all(user.target is operator.getitem for user in node.users):
        return None
    wanted = tuple(rest[0]) if backward else (False, False, False)
    geometry = _of_both(stride), _of_both(padding), _of_both(dilation)
    return Convolution(node, gradient, image, weight, None if backward else bias, *geometry, groups, wanted)


def _of_both(given: Sequence[int]) -> tuple[int, int]:
    """A number for height and one for width; torch takes one for both too."""
    return (given[0], given[0]) if len(given) == 1 else (given[0], given[1])


def _is_image(value: torch.Tensor | None, device: str) -> bool:
    if value is None or value.dim() != 4 or value.dtype not in _TYPES or value.layout is not torch.strided:
        return False
    return value.device.type == device and (is_symbolic(value) or value.numel() > 0)


def is_pointwise(convolution: Convolution) -> bool:
    """Whether each pixel of the result is computed from one pixel of the image."""
    shape = convolution.weight.meta["val"].shape
    if tuple(shape[2:]) != (1, 1) or convolution.groups != 1:
        return False
    return convolution.stride == (1, 1) and convolution.padding == (0, 0)


def has_channels_last(node: torch.fx.Node) -> bool:
    """Whether an image has its channels innermost; a weight of 1 x 1 has both layouts."""
    return is_channels_last(node.meta["val"])


def rewrite_convolutions(
    graph: torch.fx.Graph, rewrite: Callable[[Convolution, dict[torch.fx.Node, Any]], None]
) -> bool:
    """Call ``rewrite`` on every convolution; returns whether it replaced one.

    It adds to the dictionary each result that replaces another, with the value that readers knew.
    """
    promised = returned_values(graph)
    replaced: dict[torch.fx.Node, Any] = {}
    for convolution in convolutions(graph):
        rewrite(convolution, replaced)
    if replaced:
        propagate_strides(graph, replaced)
        keep_output_strides(graph, promised)
    return bool(replaced)


def replace_gradients(
    convolution: Convolution, results: dict[int, torch.fx.Node], replaced: dict[torch.fx.Node, Any]
) -> None:
    """Let readers of gradients read ``results``; ``replaced`` gets these with the values the readers knew."""
    node = convolution.node
    for user in list(node.users):
        position = user.args[1]
        assert isinstance(position, int)
        if position in results:
            replaced[results[position]] = user.meta["val"]
            user.replace_all_uses_with(results[position])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
