"""Convolutions and linear layers as maps of channels: their weights scaled, their biases shifted.

A step is one operation with a constant, a number or one for each channel. Steps after a layer change what it gives,
steps before it what it takes; either way the layer can be remade with other weights, which are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import has_one_dtype, is_symbolic
from torchkiln.graph.foldable import REQUIRE_FOLDABLE, is_foldable
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.weights import weight_values, weights_under
from torchkiln.passes.freezing.linears import Linear, linear_of

_aten = torch.ops.aten
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ADD, SUB, MUL, DIV = _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor


@dataclass(frozen=True)
class Step:
    """``operation`` with a constant on its right: a number, or a node whose dimension ``channel`` counts channels.

    Where ``channel`` is None, the node has one element.
    """

    operation: torch._ops.OpOverload
    constant: float | torch.fx.Node
    channel: int | None = None


@dataclass(frozen=True)
class Geometry:
    """The arguments of a convolution behind its bias."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        spans = [list(span) for span in (self.stride, self.padding, self.dilation)]
        return (*spans, self.transposed, list(self.output_padding), self.groups)


@dataclass(frozen=True)
class Layer:
    """A convolution, or a linear layer where ``geometry`` is None; weight and bias depend on weights alone.

    ``dim`` is the dimension of channels of what it takes and of what it gives. The weight of a linear layer is out by
    in, or in by out where no node has the other; a convolution's is as its call reads it.
    """

    node: torch.fx.Node
    input: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    geometry: Geometry | None
    dim: int
    linear: Linear | None = None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.node.meta["val"].dtype
        return found

    @property
    def outputs(self) -> int:
        return int(self.node.meta["val"].shape[self.dim])

    @property
    def adds_before(self) -> bool:
        """Whether a constant added to the input is one added to the result: not where zeros are padded around it."""
        return self.geometry is None or (not self.geometry.transposed and not any(self.geometry.padding))


def layers(graph: torch.fx.Graph) -> Iterator[tuple[Layer, frozenset[torch.fx.Node]]]:
    """The layers in graph order, each with the values that depend on weights alone; read when asked for."""
    constant = weight_values(graph)
    for node in sorted(calls_of(graph, _aten.convolution.default, _aten.mm.default, _aten.addmm.default)):
        found = layer_of(node, constant)
        if found is not None:
            yield found, constant


def layer_of(node: torch.fx.Node, constant: frozenset[torch.fx.Node]) -> Layer | None:
    """``node`` as a layer, if it is one."""
    if node.target is not _aten.convolution.default:
        linear = linear_of(node, constant)
        if linear is None or linear.node.meta["val"].dtype not in _TYPES:
            return None
        return Layer(node, linear.input, linear.weight or linear.matrix, linear.bias, None, 1, linear)
    arguments: Any = node.args
    image, weight, bias, stride, padding, dilation, transposed, output_padding, groups = arguments
    value, known = fake_tensor(node), fake_tensor(weight)
    if value is None or known is None or value.dtype not in _TYPES or not has_one_dtype(node):
        return None
    if image in constant or weight not in constant or not (bias is None or bias in constant) or is_symbolic(known):
        return None
    geometry = Geometry(
        tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups
    )
    return Layer(node, image, weight, bias, geometry, 1)


def is_per_channel(constant: torch.Tensor, value: torch.Tensor, dim: int, channels: int) -> tuple[bool, int | None]:
    """Whether ``constant`` has one element, or one for each channel of ``value``; and which dimension counts them."""
    if is_symbolic(constant) or constant.is_complex() or constant.dtype is torch.bool or constant.dim() > value.dim():
        return False, None
    if constant.numel() == 1:
        return True, None
    place = dim - (value.dim() - constant.dim())
    fits = place >= 0 and constant.shape[place] == channels == constant.numel()
    return fits, place if fits else None


def may_scale(layer: Layer, steps: Iterable[Step]) -> bool:
    """Whether the numbers among ``steps`` leave weights of the layer in the range of their dtype.

    Tensors are looked at where weights are prepared, so one of both must be made of weights.
    """
    factor = 1.0
    for step in steps:
        if step.operation not in (MUL, DIV):
            continue
        if isinstance(step.constant, torch.fx.Node):
            if not weights_under(layer.weight) and not weights_under(step.constant):
                return False
            continue
        factor = factor * step.constant if step.operation is MUL else factor / step.constant
        if not is_foldable(factor, layer.dtype):
            return False
    return True


def remade_after(layer: Layer, steps: Sequence[Step], wide: torch.dtype, before: torch.fx.Node) -> torch.fx.Node:
    """The layer with ``steps`` on its result folded into weight and bias, inserted before a node."""
    fold = _Folding(before, wide, layer)
    weight, bias = fold.widened(layer.weight), None if layer.bias is None else fold.widened(layer.bias)
    for step in steps:
        constant = fold.constant(step)
        if step.operation in (MUL, DIV):
            weight = fold.call(step.operation, weight, _for_outputs(fold, layer, constant))
        if bias is None and step.operation in (ADD, SUB):
            bias = fold.call(_aten.full.default, [layer.outputs], 0, dtype=wide, device=torch.device("cpu"))
        bias = None if bias is None else fold.call(step.operation, bias, constant)
    return _remade(fold, layer, layer.input, weight, bias)


def remade_before(
    layer: Layer, steps: Sequence[Step], given: torch.fx.Node, wide: torch.dtype, before: torch.fx.Node
) -> torch.fx.Node:
    """The layer of ``given``, with ``steps`` on its input folded into weight and bias, inserted before a node."""
    fold = _Folding(before, wide, layer)
    weight, bias = fold.widened(layer.weight), None if layer.bias is None else fold.widened(layer.bias)
    for step in reversed(steps):  # the last one is next to the layer
        constant = _for_inputs(fold, layer, fold.constant(step))
        scaled = fold.call(DIV if step.operation is DIV else MUL, weight, constant)
        if step.operation in (MUL, DIV):
            weight = scaled
            continue
        moved = fold.call(_aten.sum.dim_IntList, scaled, _summed_dims(layer))
        if bias is None:
            bias = fold.call(_aten.neg.default, moved) if step.operation is SUB else moved
        else:
            bias = fold.call(step.operation, bias, moved)
    return _remade(fold, layer, given, weight, bias)


class _Folding:
    """Calls inserted before one node, that compute weights of ``layer`` in the dtype ``wide``."""

    def __init__(self, before: torch.fx.Node, wide: torch.dtype, layer: Layer) -> None:
        self._before, self.wide, self._layer = before, wide, layer

    def call(self, target: torch._ops.OpOverload, *args: object, **kwargs: object) -> torch.fx.Node:
        return insert_call(self._before, target, *args, **kwargs)

    def converted(self, value: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        return value if value.meta["val"].dtype is dtype else self.call(CONVERT, value, dtype)

    def widened(self, value: torch.fx.Node) -> torch.fx.Node:
        """``value`` in the dtype to compute in, as it was before autocast rounded it."""
        return self.converted(self._exact(value), self.wide)

    def _exact(self, value: torch.fx.Node) -> torch.fx.Node:
        source = value.args[0] if value.target is CONVERT else None
        if isinstance(source, torch.fx.Node):
            exact = source.meta["val"].dtype
            if exact.is_floating_point and torch.promote_types(exact, self.wide) is self.wide:
                return source
        return value

    def constant(self, step: Step) -> torch.fx.Node | float:
        """The constant of a step: a number, a tensor without dimensions, or one of as many elements as channels."""
        if not isinstance(step.constant, torch.fx.Node):
            return step.constant
        value = self.converted(step.constant, self.wide)
        if step.operation in (MUL, DIV):
            weight, half = self._exact(self._layer.weight), self._layer.dtype is torch.float16
            value = self.call(REQUIRE_FOLDABLE, value, weight, step.operation is DIV, half)
        dims = [dim for dim in range(value.meta["val"].dim()) if dim != step.channel]
        return self.call(_aten.squeeze.dims, value, dims) if dims else value


def _for_outputs(fold: _Folding, layer: Layer, constant: torch.fx.Node | float) -> torch.fx.Node | float:
    """A constant of the channels that a layer gives, as its weight is to be multiplied by."""
    if not isinstance(constant, torch.fx.Node) or constant.meta["val"].dim() == 0:
        return constant
    if layer.geometry is None:
        return constant if _is_in_by_out(layer) else fold.call(_aten.view.default, constant, [-1, 1])
    if layer.geometry.transposed:
        return _by_group(fold, layer, constant)
    return fold.call(_aten.view.default, constant, [-1, *_ones(layer, 1)])


def _for_inputs(fold: _Folding, layer: Layer, constant: torch.fx.Node | float) -> torch.fx.Node | float:
    """A constant of the channels that a layer takes, as its weight is to be multiplied by."""
    if not isinstance(constant, torch.fx.Node) or constant.meta["val"].dim() == 0:
        return constant
    if layer.geometry is None:
        return fold.call(_aten.view.default, constant, [-1, 1]) if _is_in_by_out(layer) else constant
    if layer.geometry.transposed:
        return fold.call(_aten.view.default, constant, [-1, *_ones(layer, 1)])
    return _by_group(fold, layer, constant)


def _by_group(fold: _Folding, layer: Layer, constant: torch.fx.Node) -> torch.fx.Node:
    """A constant of channels that the second dimension of the weight counts, anew in each group of the first."""
    assert layer.geometry is not None
    groups, shape = layer.geometry.groups, layer.weight.meta["val"].shape
    if groups == 1:
        return fold.call(_aten.view.default, constant, [1, -1, *_ones(layer, 2)])
    by_group = fold.call(_aten.view.default, constant, [groups, 1, shape[1]])
    repeated = fold.call(_aten.repeat.default, by_group, [1, shape[0] // groups, 1])
    return fold.call(_aten.view.default, repeated, [shape[0], shape[1], *_ones(layer, 2)])


def _ones(layer: Layer, dims: int) -> list[int]:
    return [1] * (layer.weight.meta["val"].dim() - dims)


def _summed_dims(layer: Layer) -> list[int]:
    """The dimensions of the weight that one channel of the result sums over."""
    return [0] if _is_in_by_out(layer) else list(range(1, layer.weight.meta["val"].dim()))


def _is_in_by_out(layer: Layer) -> bool:
    return layer.linear is not None and layer.linear.weight is None


def _remade(
    fold: _Folding, layer: Layer, given: torch.fx.Node, weight: torch.fx.Node, bias: torch.fx.Node | None
) -> torch.fx.Node:
    weight = fold.converted(weight, layer.dtype)
    bias = None if bias is None else fold.converted(bias, layer.dtype)
    if layer.geometry is not None:
        return fold.call(_aten.convolution.default, given, weight, bias, *layer.geometry.arguments)
    matrix = weight if _is_in_by_out(layer) else fold.call(_aten.permute.default, weight, [1, 0])
    if bias is None:
        return fold.call(_aten.mm.default, given, matrix)
    return fold.call(_aten.addmm.default, bias, given, matrix)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype to compute weights in: float32, or float64 where that occurs."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
