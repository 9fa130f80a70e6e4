"""Matmuls of numbers with int8 weights read the integers, where few rows meet them.

The weight is written as ``w.to(x.dtype) * scale``, or the scale is applied to the result. As numbers it would be stored
at each call, two or four times as large as the integers. Milliseconds on one thread of a Zen 4, weights of 4096 x 4096,
and of 1024 x 1024 in parentheses:

| rows | float32: matmul of numbers | library | loop | bfloat16: matmul of numbers | library | loop |
|---|---|---|---|---|---|---|
| 1 | 9.4 (0.21) | 14.3 (0.93) | 1.2 (0.07) | 19.9 (1.20) | 1.7 (0.09) | 2.0 (0.16) |
| 2 | 13.8 (0.29) | 28.6 (1.81) | 2.6 (0.10) | 14.1 (0.36) | 1.9 (0.11) | 3.8 (0.24) |
| 4 | 13.5 (0.82) | 56.4 (3.70) | 4.3 (0.26) | 5.9 (0.52) | 2.5 (0.14) | 7.4 (0.46) |
| 8 | | | | 6.2 (0.64) | 4.5 (0.26) | 14.4 (0.91) |
| 16 | | | | 7.8 (1.02) | 8.6 (0.55) | 23.2 (1.43) |

So float32 is a loop of ours up to 4 rows, and bfloat16 a call of ``_weight_int8pack_mm`` up to 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.graph.fake import size_hint
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, calls_of, fake_tensor, replace_each
from torchkiln.graph.operators import CASTS
from torchkiln.graph.weights import weight_values
from torchkiln.passes.freezing.quantized.calls import contiguous

_aten = torch.ops.aten
Node = torch.fx.Node

_MOST_ROWS = {torch.float32: 4, torch.bfloat16: 8}
_LIBRARY = getattr(_aten, "_weight_int8pack_mm", None)


@dataclass(frozen=True)
class _IntegerWeight:
    """The right factor of a matmul: int8, with results along ``axis``, and one scale for each result or None."""

    stored: Node
    axis: int
    scale: Node | None


def use_weight_integers(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    found = calls_of(graph, _aten.mm.default, _aten.addmm.default)
    constant = weight_values(graph) if found else frozenset()
    return replace_each(found, partial(_use_weight_integers, constant=constant))


def _use_weight_integers(node: Node, constant: frozenset[Node]) -> Node | None:
    with_bias = node.target is _aten.addmm.default
    arguments: Any = node.args
    rows, factor = arguments[1:3] if with_bias else arguments[:2]
    known = fake_tensor(rows)
    if known is None or known.device.type != "cpu" or known.dtype not in _MOST_ROWS:
        return None
    if size_hint(known.shape[0]) > _MOST_ROWS[known.dtype]:
        return None
    if with_bias and (argument(node, "alpha") != 1 or argument(node, "beta") != 1):
        return None
    weight = _integer_weight(factor)
    if weight is None or weight.stored not in constant:
        return None
    integers = weight.stored
    if weight.axis == 1:  # the library and the loop read the integers of one result after the other
        integers = insert_call(node, _aten.permute.default, integers, [1, 0])
    integers = contiguous(node, integers)
    if known.dtype == torch.float32:
        made = _summed(node, rows, integers, weight.scale)
    elif _LIBRARY is not None:
        made = _called(node, rows, integers, weight.scale)
    else:
        return None
    return insert_call(node, _aten.add.Tensor, made, arguments[0]) if with_bias else made


def _summed(node: Node, rows: Node, integers: Node, scale: Node | None) -> Node:
    numbers = insert_call(node, torch.ops.prims.convert_element_type.default, integers, torch.float32)
    product = insert_call(node, _aten.mul.Tensor, insert_call(node, _aten.unsqueeze.default, rows, 1), numbers)
    made = insert_call(node, _aten.sum.dim_IntList, product, [-1])
    if scale is None:
        return made
    return insert_call(node, _aten.mul.Tensor, made, insert_call(node, _aten.view.default, scale, [-1]))


def _called(node: Node, rows: Node, integers: Node, scale: Node | None) -> Node:
    assert _LIBRARY is not None
    known = fake_tensor(rows)
    assert known is not None
    if scale is None:
        count = integers.meta["val"].shape[0]
        scale = insert_call(node, _aten.full.default, [count], 1.0, dtype=known.dtype, device="cpu")
    else:
        scale = insert_call(node, _aten.view.default, scale, [-1])
    return insert_call(node, _LIBRARY.default, contiguous(node, rows), integers, scale)


def _integer_weight(factor: Any) -> _IntegerWeight | None:
    """``factor`` read through transposes, one product with a scale, and the cast from int8."""
    axis, scale = 1, None
    while isinstance(factor, Node):
        if factor.target is _aten.permute.default and factor.args[1] == [1, 0]:
            axis, factor = 1 - axis, factor.args[0]
        elif factor.target is _aten.mul.Tensor and scale is None:
            parted = _without_scale(factor, axis)
            if parted is None:
                return None
            factor, scale = parted
        elif factor.target in CASTS:
            source = factor.args[0]
            known = fake_tensor(source)
            if not isinstance(source, Node) or known is None or known.dtype != torch.int8 or known.dim() != 2:
                return None
            return _IntegerWeight(source, axis, scale)
        else:
            return None
    return None


def _without_scale(product: Node, axis: int) -> tuple[Node, Node] | None:
    """The two factors of a product: one of its shape, and one number for each slice along ``axis``."""
    shape = product.meta["val"].shape
    for one, other in (product.args, product.args[::-1]):
        values, scales = fake_tensor(one), fake_tensor(other)
        if values is None or scales is None or values.shape != shape or scales.dtype != values.dtype:
            continue
        padded = (1,) * (2 - scales.dim()) + tuple(scales.shape)
        if padded == tuple(size if dim == axis else 1 for dim, size in enumerate(shape)):
            return one, other  # type: ignore[return-value]
    return None
