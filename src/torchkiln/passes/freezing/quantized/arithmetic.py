"""Quantize and dequantize calls that no int8 call took become arithmetic, which loops fuse with what is around them.

The arithmetic is that of torch's definitions, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, argument_names, fake_tensor, replace
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.quantized_operators import operator_name
from torchkiln.graph.strides import restrided

_aten = torch.ops.aten
Node = torch.fx.Node


class _Insertion:
    """Calls made in place of ``node``, and its arguments by name."""

    def __init__(self, node: Node) -> None:
        assert isinstance(node.target, torch._ops.OpOverload)
        self.node = node
        self.given: dict[str, Any] = {name: argument(node, name) for name in argument_names(node.target)}

    def call(self, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Node:
        return insert_call(self.node, target, *args, **kwargs)

    def to(self, value: Node, dtype: torch.dtype) -> Node:
        known = fake_tensor(value)
        return value if known is not None and known.dtype == dtype else self.call(CONVERT, value, dtype)

    def clamped(self, value: Node) -> Node:
        low, high, dtype = self.given["quant_min"], self.given["quant_max"], self.given["dtype"]
        return self.to(self.call(_aten.clamp.default, value, low, high), dtype)

    def along(self, values: Node, axis: int, dims: int) -> Node:
        """One value for each slice along ``axis`` of a tensor of ``dims`` dimensions."""
        return self.call(_aten.view.default, values, [-1 if dim == axis % dims else 1 for dim in range(dims)])


def _quantize_by_numbers(at: _Insertion) -> Node:
    value = at.to(at.given["input"], torch.float32)
    scaled = at.call(_aten.round.default, at.call(_aten.mul.Tensor, value, 1.0 / at.given["scale"]))
    return at.clamped(at.call(_aten.add.Tensor, scaled, at.given["zero_point"]))


def _quantize_by_tensors(at: _Insertion) -> Node:
    value = at.to(at.given["input"], torch.float32)
    inverse = at.call(_aten.reciprocal.default, at.to(_single(at, "scale"), torch.float64))
    scaled = at.call(_aten.round.default, at.call(_aten.mul.Tensor, value, at.to(inverse, torch.float32)))
    return at.clamped(at.call(_aten.add.Tensor, scaled, at.to(_single(at, "zero_point"), torch.float32)))


def _dequantize_by_numbers(at: _Insertion) -> Node:
    value = at.to(at.given["input"], at.given["out_dtype"] or torch.float32)
    return at.call(_aten.mul.Tensor, at.call(_aten.sub.Tensor, value, at.given["zero_point"]), at.given["scale"])


def _dequantize_by_tensors(at: _Insertion) -> Node:
    dtype = at.given["out_dtype"] or torch.float32
    # A number counts as one of float32 in arithmetic of half types, as eager's has it.
    inner = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    zero_point, scale = at.to(_single(at, "zero_point"), inner), at.to(_single(at, "scale"), inner)
    moved = at.to(at.call(_aten.sub.Tensor, at.to(at.given["input"], inner), zero_point), dtype)
    return at.to(at.call(_aten.mul.Tensor, at.to(moved, inner), scale), dtype)


def _single(at: _Insertion, name: str) -> Node:
    """An argument of one element, without dimensions."""
    return at.call(_aten.view.default, at.given[name], [])


def _quantize_channels(at: _Insertion) -> Node:
    value = at.to(at.given["input"], torch.float32)
    dims = value.meta["val"].dim()
    scales = at.call(_aten.reciprocal.default, at.along(at.given["scales"], at.given["axis"], dims))
    rounded = at.call(_aten.round.default, at.call(_aten.mul.Tensor, value, scales))
    return at.clamped(at.call(_aten.add.Tensor, rounded, at.along(at.given["zero_points"], at.given["axis"], dims)))


def _dequantize_channels(at: _Insertion) -> Node:
    known = at.given["input"].meta["val"]
    scales, zero_points = at.given["scales"], at.given["zero_points"]
    inner = scales.meta["val"].dtype
    value = at.to(at.given["input"], inner)
    if zero_points is not None:
        shifts = at.along(at.to(zero_points, inner), at.given["axis"], known.dim())
        value = at.call(_aten.sub.Tensor, value, shifts)
    scaled = at.call(_aten.mul.Tensor, value, at.along(scales, at.given["axis"], known.dim()))
    return at.to(scaled, at.given["out_dtype"] or torch.float32)


def _quantize_tokens(at: _Insertion) -> Node:
    inverse = at.call(_aten.reciprocal.default, at.given["scales"])
    scaled = at.call(_aten.mul.Tensor, at.given["input"], inverse)
    moved = at.call(_aten.add.Tensor, scaled, at.given["zero_points"])
    return at.clamped(at.call(_aten.round.default, moved))


def _dequantize_tokens(at: _Insertion) -> Node:
    moved = at.call(_aten.sub.Tensor, at.given["input"], at.given["zero_points"])
    return at.to(at.call(_aten.mul.Tensor, moved, at.given["scales"]), at.given["output_dtype"])


def _choose(at: _Insertion, *, symmetric: bool) -> tuple[Node, Node]:
    low, high, dtype = at.given["quant_min"], at.given["quant_max"], at.given["dtype"]
    value: Node = at.given["input"]
    device = value.meta["val"].device
    zero = at.call(_aten.full.default, [], 0, dtype=value.meta["val"].dtype, device=device)
    smallest = at.call(_aten.minimum.default, at.call(_aten.amin.default, value), zero)
    largest = at.call(_aten.maximum.default, at.call(_aten.amax.default, value), zero)
    epsilon = at.call(_aten.full.default, [1], at.given["eps"], dtype=torch.float32, device=device)
    if symmetric:
        reach = at.call(_aten.maximum.default, at.call(_aten.neg.default, smallest), largest)
        scale = at.call(_aten.div.Tensor, reach, float(high - low) / 2)
        scale = at.call(_aten.maximum.default, scale, epsilon)
        middle = 128 if dtype == torch.uint8 else 0
        zero_point = at.call(_aten.full.default, [1], middle, dtype=torch.int64, device=device)
        return at.to(scale, torch.float64), zero_point
    scale = at.call(_aten.div.Tensor, at.call(_aten.sub.Tensor, largest, smallest), float(high - low))
    scale = at.call(_aten.maximum.default, scale, epsilon)
    steps = at.to(at.call(_aten.round.default, at.call(_aten.div.Tensor, smallest, scale)), torch.int32)
    zero_point = at.call(_aten.clamp.default, at.call(_aten.rsub.Scalar, steps, low), low, high)
    return at.to(scale, torch.float64), at.to(zero_point, torch.int64)


_DEFINITIONS: Mapping[str, Callable[[_Insertion], Node | tuple[Node, ...]]] = MappingProxyType(
    {
        "quantize_per_tensor": _quantize_by_numbers,
        "quantize_per_tensor.tensor": _quantize_by_tensors,
        "dequantize_per_tensor": _dequantize_by_numbers,
        "dequantize_per_tensor.tensor": _dequantize_by_tensors,
        "quantize_per_channel": _quantize_channels,
        "dequantize_per_channel": _dequantize_channels,
        "quantize_per_token": _quantize_tokens,
        "dequantize_per_token": _dequantize_tokens,
        "choose_qparams.tensor": lambda at: _choose(at, symmetric=False),
        "choose_qparams_symmetric.tensor": lambda at: _choose(at, symmetric=True),
    }
)


def write_out_quantization(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in list(graph_module.graph.nodes):
        definition = _DEFINITIONS.get(operator_name(node.target))
        if definition is None:
            continue
        made = definition(_Insertion(node))
        replace(node, _laid_out(made, node) if isinstance(made, Node) else made)
        changed = True
    return changed


def _laid_out(made: Node, node: Node) -> Node:
    """``made`` with the strides that ``node`` had."""
    wanted = fake_tensor(node)
    known = fake_tensor(made)
    assert wanted is not None
    assert known is not None
    if known.stride() == wanted.stride():
        return made
    with node.graph.inserting_before(node):
        return restrided(node.graph, made, wanted)[-1]
