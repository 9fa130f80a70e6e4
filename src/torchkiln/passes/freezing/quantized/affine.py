"""Affine quantization in graphs: which values are stored integers, with which scale and zero point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.nodes import argument, fake_tensor
from torchkiln.graph.operators import CASTS
from torchkiln.graph.quantized_operators import operator_name

Node = torch.fx.Node

_DEQUANTIZE = frozenset({"dequantize_per_tensor", "dequantize_per_tensor.tensor"})
_QUANTIZE = frozenset({"quantize_per_tensor", "quantize_per_tensor.tensor"})


@dataclass(frozen=True)
class Affine:
    """A number is ``scale * (stored - zero_point)``, and ``stored`` is an integer from ``low`` to ``high``.

    Scale and zero point are numbers, or nodes of one element where they are chosen at run time.
    """

    scale: float | Node
    zero_point: int | Node
    low: int
    high: int
    dtype: torch.dtype

    @property
    def is_static(self) -> bool:
        return not isinstance(self.scale, Node) and not isinstance(self.zero_point, Node)

    @property
    def is_full_range(self) -> bool:
        """Whether every integer of the dtype is in range, so that conversion to the dtype clamps as quantizing does."""
        limits = torch.iinfo(self.dtype)
        return (self.low, self.high) == (limits.min, limits.max)


@dataclass(frozen=True)
class Quantized:
    """The integers ``stored`` behind a value of ``dtype``."""

    stored: Node
    affine: Affine
    dtype: torch.dtype


def _affine(node: Node) -> Affine:
    names = ("scale", "zero_point", "quant_min", "quant_max", "dtype")
    return Affine(*(argument(node, name) for name in names))


def is_rounding(node: object) -> bool:
    """Whether ``node`` is a cast between floating dtypes, as autocast inserts them: those are looked through.

    A cast to integers or booleans changes values.
    """
    if not isinstance(node, Node) or node.target not in CASTS:
        return False
    known = (fake_tensor(node), fake_tensor(node.args[0]))
    return all(value is not None and value.dtype.is_floating_point for value in known)


def is_dequantize(node: object) -> bool:
    """Whether ``node`` makes numbers of integers that share one scale."""
    return isinstance(node, Node) and operator_name(node.target) in _DEQUANTIZE


def dequantized(node: object) -> Quantized | None:
    """What ``node``, a dequantize call or a cast of one, is made of."""
    known = fake_tensor(node)
    if not isinstance(node, Node) or known is None:
        return None
    source: Any = node
    while is_rounding(source):
        source = source.args[0]
    if not is_dequantize(source):
        return None
    return Quantized(argument(source, "input"), _affine(source), known.dtype)


def quantizes(node: object) -> Quantized | None:
    """For a quantize call: the value it quantizes, in place of ``stored``, and how."""
    if not isinstance(node, Node) or operator_name(node.target) not in _QUANTIZE:
        return None
    value = argument(node, "input")
    known = fake_tensor(value)
    assert known is not None
    return Quantized(value, _affine(node), known.dtype)


@dataclass(frozen=True)
class QuantizedWeight:
    """An int8 weight: ``scales`` is a node with one scale for each slice along ``axis``, or the number for all."""

    stored: Node
    scales: float | Node
    zero_points: int | Node | None
    axis: int
    dtype: torch.dtype


def quantized_weight(node: object) -> QuantizedWeight | None:
    """What ``node``, a dequantized weight, a cast or a transpose of one, is made of; int8 with symmetric scales.

    Zero points that are nodes must turn out to be 0.
    """
    source, known = node, fake_tensor(node)
    if known is None:
        return None
    while isinstance(source, Node) and is_rounding(source):
        source = source.args[0]
    if not isinstance(source, Node):
        return None
    name = operator_name(source.target)
    if name == "dequantize_per_channel":
        stored, scales, zero_points, axis = (argument(source, n) for n in ("input", "scales", "zero_points", "axis"))
        found = QuantizedWeight(stored, scales, zero_points, axis % known.dim(), known.dtype)
    elif name == "dequantize_per_tensor":
        affine = _affine(source)
        assert not isinstance(affine.scale, Node)
        found = QuantizedWeight(argument(source, "input"), affine.scale, affine.zero_point, 0, known.dtype)
        if affine.zero_point != 0:
            return None
    else:
        return None
    integers = fake_tensor(found.stored)
    return found if integers is not None and integers.dtype == torch.int8 else None
