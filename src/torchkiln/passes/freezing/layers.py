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
from torchkiln.graph.foldable import REQUIRE_FINITE, SCALED_WEIGHT, is_addable, is_foldable
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.weights import UNFOLDED, is_larger_than_its_weights, weight_values, weights_under
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
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
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


def may_fold(layer: Layer, steps: Sequence[Step]) -> bool:
    """Whether ``steps`` may become part of the layer's weight and bias, as far as the graph tells.

    Numbers among them must leave weights in the range of their dtype. Tensors are looked at where weights are prepared,
    so something must be made of weights; and of weights that were not refused there.
    """
    owners = _owners(layer, steps)
    tensors = any(isinstance(step.constant, torch.fx.Node) for step in steps)
    scales = any(step.operation in (MUL, DIV) for step in steps)
    if any(UNFOLDED in owner.meta for owner in owners) or (not owners and (tensors or scales)):
        return False
    if scales and is_larger_than_its_weights(layer.weight):
        return False  # it would be multiplied at each call
    factor, added = 1.0, 0.0
    for step in steps:
        if isinstance(step.constant, torch.fx.Node):
            continue
        if step.operation in (ADD, SUB):
            added += abs(step.constant)
        else:
            factor = factor * step.constant if step.operation is MUL else factor / step.constant
        if not is_foldable(factor, layer.dtype) or not is_addable(added, layer.dtype):
            return False
    return True


def _owners(layer: Layer, steps: Iterable[Step]) -> list[torch.fx.Node]:
    """The inputs that the layer's weight is made of; those of the constants where it is made of none."""
    found = weights_under(layer.weight)
    if not found:
        constants = [step.constant for step in steps if isinstance(step.constant, torch.fx.Node)]
        found = set().union(*map(weights_under, constants))
    return sorted(found)


def remade_after(layer: Layer, steps: Sequence[Step], wide: torch.dtype, before: torch.fx.Node) -> torch.fx.Node:
    """The layer with ``steps`` on its result folded into weight and bias, inserted before a node."""
    fold = _Folding(before, wide, layer, _owners(layer, steps))
    factor, bias = None, None if layer.bias is None else fold.exact(layer.bias)
    for step in steps:
        constant = fold.constant(step)
        if step.operation in (MUL, DIV):
            factor = fold.call(step.operation, factor or fold.filled(layer.outputs, 1.0), constant)
        if bias is None and step.operation in (ADD, SUB):
            bias = fold.filled(layer.outputs, 0.0)
        bias = None if bias is None else fold.call(step.operation, bias, constant)
    weight = (
        layer.weight if factor is None else fold.scaled(_for_outputs(fold, layer, factor), grouped=_transposed(layer))
    )
    return _remade(fold, layer, layer.input, weight, bias)


def remade_before(
    layer: Layer, steps: Sequence[Step], given: torch.fx.Node, wide: torch.dtype, before: torch.fx.Node
) -> torch.fx.Node:
    """The layer of ``given``, with ``steps`` on its input folded into weight and bias, inserted before a node."""
    fold = _Folding(before, wide, layer, _owners(layer, steps))
    factor, bias = None, None if layer.bias is None else fold.exact(layer.bias)
    channels = int(layer.input.meta["val"].shape[layer.dim])
    for step in reversed(steps):  # the last one is next to the layer
        constant = fold.constant(step)
        if step.operation in (MUL, DIV):
            factor = fold.call(step.operation, factor or fold.filled(channels, 1.0), constant)
            continue
        added = constant if factor is None else fold.call(MUL, factor, constant)
        if isinstance(added, torch.fx.Node):
            added = _for_inputs(fold, layer, fold.converted(added, wide))
        terms = fold.call(MUL, fold.widened(layer.weight), added)
        moved = fold.converted(fold.call(_aten.sum.dim_IntList, terms, _summed_dims(layer)), torch.float64)
        if bias is None:
            bias = fold.call(_aten.neg.default, moved) if step.operation is SUB else moved
        else:
            bias = fold.call(step.operation, bias, moved)
    weight = (
        layer.weight
        if factor is None
        else fold.scaled(_for_inputs(fold, layer, factor), grouped=not _transposed(layer))
    )
    return _remade(fold, layer, given, weight, bias)


def _transposed(layer: Layer) -> bool:
    return layer.geometry is not None and layer.geometry.transposed


class _Folding:
    """Calls inserted before one node, that compute weights of ``layer`` in the dtype ``wide``.

    Constants for each channel are few, and are computed in float64: products of them are rounded once. ``owners`` are
    the inputs that a refusal names.
    """

    def __init__(self, before: torch.fx.Node, wide: torch.dtype, layer: Layer, owners: Sequence[torch.fx.Node]) -> None:
        self._before, self.wide, self._layer = before, wide, layer
        places = {node: position for position, node in enumerate(before.graph.find_nodes(op="placeholder"))}
        self._inputs = [places[node] for node in owners]

    def call(self, target: torch._ops.OpOverload, *args: object, **kwargs: object) -> torch.fx.Node:
        return insert_call(self._before, target, *args, **kwargs)

    def converted(self, value: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        return value if value.meta["val"].dtype is dtype else self.call(CONVERT, value, dtype)

    def widened(self, value: torch.fx.Node) -> torch.fx.Node:
        """``value`` in the dtype to compute in, as it was before autocast rounded it."""
        return self.converted(self._unrounded(value), self.wide)

    def exact(self, value: torch.fx.Node) -> torch.fx.Node:
        return self.converted(self._unrounded(value), torch.float64)

    def filled(self, count: int, number: float) -> torch.fx.Node:
        return self.call(_aten.full.default, [count], number, dtype=torch.float64, device=torch.device("cpu"))

    def scaled(self, factor: torch.fx.Node, *, grouped: bool) -> torch.fx.Node:
        """The layer's weight times ``factor``, laid out along it: looked at where weights are prepared."""
        groups = self._layer.geometry.groups if grouped and self._layer.geometry is not None else 1
        weight = self._unrounded(self._layer.weight)
        return self.call(SCALED_WEIGHT, weight, factor, self.wide, self._layer.dtype, groups, self._inputs)

    def rounded_bias(self, bias: torch.fx.Node) -> torch.fx.Node:
        if not self._inputs:  # numbers alone, which were looked at
            return self.converted(bias, self._layer.dtype)
        return self.call(REQUIRE_FINITE, bias, self._layer.dtype, self._inputs)

    def constant(self, step: Step) -> torch.fx.Node | float:
        """The constant of a step: a number, a tensor without dimensions, or one of as many elements as channels."""
        if not isinstance(step.constant, torch.fx.Node):
            return step.constant
        value = self.exact(step.constant)
        dims = [dim for dim in range(value.meta["val"].dim()) if dim != step.channel]
        return self.call(_aten.squeeze.dims, value, dims) if dims else value

    def _unrounded(self, value: torch.fx.Node) -> torch.fx.Node:
        source = value.args[0] if value.target is CONVERT else None
        if isinstance(source, torch.fx.Node):
            exact = source.meta["val"].dtype
            if exact.is_floating_point and torch.promote_types(exact, self.wide) is self.wide:
                return source
        return value


def _for_outputs(fold: _Folding, layer: Layer, constant: torch.fx.Node) -> torch.fx.Node:
    """A constant of the channels that a layer gives, as its weight is to be multiplied by."""
    if layer.geometry is None:
        return constant if _is_in_by_out(layer) else fold.call(_aten.view.default, constant, [-1, 1])
    if layer.geometry.transposed:
        return _by_group(fold, layer, constant)
    return fold.call(_aten.view.default, constant, [-1, *_ones(layer, 1)])


def _for_inputs(fold: _Folding, layer: Layer, constant: torch.fx.Node) -> torch.fx.Node:
    """A constant of the channels that a layer takes, as its weight is to be multiplied by."""
    if constant.meta["val"].dim() == 0:
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
    bias = None if bias is None else fold.rounded_bias(bias)
    if layer.geometry is not None:
        return fold.call(_aten.convolution.default, given, weight, bias, *layer.geometry.arguments)
    matrix = weight if _is_in_by_out(layer) else fold.call(_aten.permute.default, weight, [1, 0])
    if bias is None:
        return fold.call(_aten.mm.default, given, matrix)
    return fold.call(_aten.addmm.default, bias, given, matrix)


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype to compute weights in: float32, or float64 where that occurs."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
