"""Linears whose rows have a scale and a zero point each multiply the integers, and loops apply both to the sums.

``result = scale * (rows @ weights - zero_point * sum(weights)) + bias``, with a scale for each result in the weights.
Their sums are computed where weights change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.graph import quantized_operators as int8
from torchkiln.graph.fake import size_hint
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, calls_of, fake_tensor, replace_each
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.quantized_operators import operator_name
from torchkiln.passes.freezing.quantized.affine import Affine, Quantized, QuantizedWeight, quantized_weight
from torchkiln.passes.freezing.quantized.calls import (
    constants,
    contiguous,
    has_int8_matmuls,
    insert_scales,
    is_constant,
    unsigned,
)
from torchkiln.passes.freezing.quantized.linears import linear_operands, linear_weight
from torchkiln.target import Target

_aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class _Tokens:
    """Rows of bytes, with scales and zero points of one column."""

    stored: Node
    scales: Node
    zero_points: Node
    dtype: torch.dtype


def multiply_tokens(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    if not any(operator_name(node.target) == "dequantize_per_token" for node in graph.nodes):
        return False
    if int8.QLINEAR is None or int8.QLINEAR_PREPACK is None or not has_int8_matmuls(target):
        return False
    found = calls_of(graph, _aten.mm.default, _aten.addmm.default, _aten.linear.default)
    return replace_each(found, partial(_multiply_tokens, constant=constants(graph)))


def _multiply_tokens(node: Node, constant: frozenset[Node]) -> Node | None:
    operands, known = linear_operands(node), fake_tensor(node)
    if operands is None or known is None or known.dtype != torch.float32:
        return None
    rows, factor, bias = operands
    source = quantized_weight(factor if factor is not None else node.args[-1])
    results = 0 if factor is not None else 1
    if source is None or not is_constant(source, constant):
        return None
    if isinstance(source.scales, Node) and source.axis != results:
        return None
    tokens = _tokens(node, rows)
    if tokens is None:
        return None
    weight = linear_weight(node, factor)
    assert weight is not None
    sums = _multiplied(node, tokens, weight)
    shifts = insert_call(node, _aten.mul.Tensor, _number(node, tokens.zero_points), _sums_of(node, weight))
    made = insert_call(node, _aten.sub.Tensor, sums, shifts)
    made = insert_call(node, _aten.mul.Tensor, made, _number(node, tokens.scales))
    return made if bias is None else insert_call(node, _aten.add.Tensor, made, bias)


def _tokens(before: Node, rows: Any) -> _Tokens | None:
    """``rows``, dequantized by row, perhaps seen with fewer dimensions."""
    viewed = isinstance(rows, Node) and rows.target is _aten.view.default
    source: Any = rows.args[0] if viewed else rows
    if not isinstance(source, Node) or operator_name(source.target) != "dequantize_per_token":
        return None
    stored, scales, zero_points, dtype = (argument(source, n) for n in ("input", "scales", "zero_points", "dtype"))
    known, result = fake_tensor(stored), fake_tensor(rows)
    if known is None or result is None or known.dtype != dtype or dtype not in (torch.uint8, torch.int8):
        return None
    columns = known.shape[-1]
    if result.dim() != 2 or result.shape[-1] != columns or result.dtype != torch.float32:
        return None
    if any(part.meta["val"].dim() != known.dim() or part.meta["val"].shape[-1] != 1 for part in (scales, zero_points)):
        return None
    if any(part.meta["val"].shape[:-1] != known.shape[:-1] for part in (scales, zero_points)):
        return None
    if viewed:
        stored = insert_call(before, _aten.view.default, stored, [-1, columns])
        scales, zero_points = (insert_call(before, _aten.view.default, part, [-1, 1]) for part in (scales, zero_points))
    return _Tokens(stored, scales, zero_points, dtype)


def _multiplied(node: Node, tokens: _Tokens, weight: QuantizedWeight) -> Node:
    """Rows times weights, as if zero points of rows were 0 and scales 1."""
    assert int8.QLINEAR is not None
    assert int8.QLINEAR_PREPACK is not None
    limits = torch.iinfo(tokens.dtype)
    plain = Affine(1.0, 0, limits.min, limits.max, tokens.dtype)
    factor = unsigned(node, Quantized(tokens.stored, plain, torch.float32))
    integers = contiguous(node, factor.stored)
    given = insert_scales(node, weight)
    sizes = [size_hint(size) for size in integers.meta["val"].shape]
    packed = insert_call(node, int8.QLINEAR_PREPACK, contiguous(node, weight.stored), sizes)
    arguments = (integers, factor.scale, factor.zero_point, packed, given.scales, given.zero_points, None)
    return insert_call(node, int8.QLINEAR, *arguments, 1.0, 0, torch.float32, "none", [], "")


def _sums_of(before: Node, weight: QuantizedWeight) -> Node:
    """For each result, the sum of its weights."""
    sums = insert_call(before, _aten.sum.dim_IntList, weight.stored, [1], dtype=torch.int32)
    return insert_call(before, _aten.mul.Tensor, insert_call(before, CONVERT, sums, torch.float32), weight.scales)


def _number(before: Node, value: Node) -> Node:
    return value if value.meta["val"].dtype == torch.float32 else insert_call(before, CONVERT, value, torch.float32)
