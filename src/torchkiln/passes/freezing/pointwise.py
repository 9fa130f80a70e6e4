"""Additions, subtractions, multiplications and divisions with constants become part of a layer's weight and bias.

Constants are numbers and values computed from weights, one for all elements or one for each channel. After a layer all
of them fold; before it, an addition only where no zeros are padded around the input. A division divides the weight: a
reciprocal would be rounded once more.

Before a layer it pays only where no kernel of ours computes the input: that one multiplies on its way, while a folded
weight is memory of its own.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import same_sizes
from torchkiln.graph.nodes import argument, fake_tensor
from torchkiln.graph.operators import Kind, kind_of, lowered
from torchkiln.passes.freezing.affine import Read, fold_after, fold_before
from torchkiln.passes.freezing.layers import ADD, DIV, MUL, SUB, Step, is_per_channel

_aten = torch.ops.aten

_ADDS = frozenset({_aten.add.Tensor, _aten.add.Scalar})
_SUBTRACTS = frozenset({_aten.sub.Tensor, _aten.sub.Scalar})
_SUBTRACTS_FROM = frozenset({_aten.rsub.Tensor, _aten.rsub.Scalar})
_MULTIPLIES = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
_DIVIDES = frozenset({_aten.div.Tensor, _aten.div.Scalar})
_TAKES_TWO = _ADDS | _SUBTRACTS | _SUBTRACTS_FROM | _MULTIPLIES | _DIVIDES
_MADE_BY_KERNELS = frozenset({Kind.POINTWISE, Kind.REDUCTION, Kind.MOVEMENT, Kind.SCATTER})


def fold_pointwise_after(graph_module: torch.fx.GraphModule) -> bool:
    return fold_after(graph_module, _steps)


def fold_pointwise_before(graph_module: torch.fx.GraphModule) -> bool:
    return fold_before(graph_module, _steps, lambda source: not _is_made_by_kernel(source))


def _steps(
    node: torch.fx.Node, value: torch.fx.Node, dim: int, channels: int, constant: frozenset[torch.fx.Node]
) -> Read | None:
    known, result = fake_tensor(value), fake_tensor(node)
    if known is None or result is None or not same_sizes(known, result) or not result.dtype.is_floating_point:
        return None
    if node.target is _aten.neg.default:
        return Read((Step(MUL, -1.0),), node)
    if node.target not in _TAKES_TWO:
        return None
    left, right = node.args[:2]
    if node.target in _SUBTRACTS_FROM:
        left, right = right, left
    other = right if left is value else left
    step = _constant(other, value, dim, channels, constant)
    if step is None or (left is value and right is value):
        return None
    steps = _in_order(node, step, value_first=left is value)
    return None if steps is None else Read(steps, node)


def _constant(
    given: object, value: torch.fx.Node, dim: int, channels: int, constant: frozenset[torch.fx.Node]
) -> Step | None:
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return Step(MUL, given)
    if not isinstance(given, torch.fx.Node) or given not in constant:
        return None
    known = fake_tensor(given)
    fits, place = (False, None) if known is None else is_per_channel(known, value.meta["val"], dim, channels)
    return Step(MUL, given, place) if fits else None


def _in_order(node: torch.fx.Node, given: Step, *, value_first: bool) -> tuple[Step, ...] | None:
    """The steps of a call with the constant of ``given``; None for a constant that is divided by the value, and others.

    A zero divides nothing: results would be infinite, and the sum of what the layer makes of such weights NaN.
    """
    constant, place = given.constant, given.channel
    if node.target in _MULTIPLIES:
        return (Step(MUL, constant, place),)
    if node.target in _DIVIDES:
        if not value_first or (not isinstance(constant, torch.fx.Node) and not _is_divisor(constant)):
            return None
        return (Step(DIV, constant, place),)
    if argument(node, "alpha") != 1:
        return None
    if node.target in _ADDS:
        return (Step(ADD, constant, place),)
    return (Step(SUB, constant, place),) if value_first else (Step(MUL, -1.0), Step(ADD, constant, place))


def _is_divisor(number: float) -> bool:
    return number != 0 and math.isfinite(number)


def _is_made_by_kernel(node: torch.fx.Node) -> bool:
    """Whether a loop of ours computes a value, which then has a further multiplication for nothing."""
    source: Any = node
    while source.target is operator.getitem or view_source(source) is not None:
        source = source.args[0]
    return source.target in lowered() and kind_of(source.target) in _MADE_BY_KERNELS
