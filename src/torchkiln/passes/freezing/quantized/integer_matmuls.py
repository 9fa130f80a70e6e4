"""Matmuls that are written of bytes, as in torchao's dynamic quantization by token, read packed weights.

Milliseconds on one thread of a Zen 4, weights of 3072 x 768, and of 4096 x 4096 in parentheses:

| rows | ``_int_mm`` | packed |
|---|---|---|
| 1 | 0.040 (0.36) | 0.085 (0.45) |
| 5 | 0.128 (3.33) | 0.089 (0.81) |
| 16 | 0.239 (4.51) | 0.203 (2.27) |

The packed call gives float32, so the sums must be read as such. It rounds them once, as a cast does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph import quantized_operators as int8
from torchkiln.graph.fake import size_hint
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, calls_of, fake_tensor, replace
from torchkiln.graph.operators import CASTS, CONVERT
from torchkiln.passes.freezing.quantized.affine import QuantizedWeight
from torchkiln.passes.freezing.quantized.calls import (
    FLIP_SIGN,
    constants,
    contiguous,
    erase_unread,
    has_int8_matmuls,
    insert_scales,
)
from torchkiln.target import Target

_aten = torch.ops.aten
Node = torch.fx.Node

_FEWEST_ROWS = 4


@dataclass(frozen=True)
class _Sums:
    """A matmul of bytes, the cast of its sums to numbers, and the zero point of the rows that is taken off between."""

    cast: Node
    zero_point: int


def pack_integer_matmuls(graph_module: torch.fx.GraphModule, target: Target) -> bool:
    graph = graph_module.graph
    found = calls_of(graph, _aten._int_mm.default)
    if not found or int8.QLINEAR is None or int8.QLINEAR_PREPACK is None or not has_int8_matmuls(target):
        return False
    constant = constants(graph)
    changed = False
    for node in found:
        if not obstacle(node, constant):
            _pack(node)
            changed = True
    return changed


def obstacle(node: Node, constant: frozenset[Node]) -> str:
    """Why a matmul of bytes is left to torch; empty where it is packed."""
    rows, weight = fake_tensor(node.args[0]), _rows_of_results(node.args[1])
    if rows is None or weight is None or weight not in constant or weight.meta["val"].dtype != torch.int8:
        return "the weight is no int8 parameter with a row for each result"
    if size_hint(rows.shape[0]) < _FEWEST_ROWS:
        return "it has few rows"
    if _sums(node) is None:
        return "its sums are read as integers"
    return ""


def _rows_of_results(factor: Any) -> Node | None:
    """What ``factor`` is the transpose of."""
    if isinstance(factor, Node) and factor.target is _aten.permute.default and factor.args[1] == [1, 0]:
        return factor.args[0]  # type: ignore[return-value]
    return None


def _sums(node: Node) -> _Sums | None:
    reader, zero_point = _only_reader(node), 0
    if reader is not None and reader.target is _aten.sub.Tensor and reader.args[0] is node:
        taken_off = _zero_point(reader.args[1], _rows_of_results(node.args[1]))
        if taken_off is None or argument(reader, "alpha") != 1:
            return None
        reader, zero_point = _only_reader(reader), taken_off
    if reader is None or reader.target not in CASTS or not reader.meta["val"].dtype.is_floating_point:
        return None
    return _Sums(reader, zero_point)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _zero_point(value: Any, weight: Node | None) -> int | None:
    """``z`` where ``value`` is ``z`` times the sum of each row of ``weight``."""
    if not isinstance(value, Node) or value.target is not _aten.mul.Tensor:
        return None
    total, factor = value.args
    if not isinstance(total, Node) or total.target is not _aten.sum.dim_IntList or not isinstance(factor, int):
        return None
    known = fake_tensor(total)
    if known is None or known.dtype != torch.int32 or _rows_of_results(total.args[0]) is not weight:
        return None
    return factor if argument(total, "dim") == [0] and 0 <= factor <= 255 else None


def _pack(node: Node) -> None:
    sums = _sums(node)
    rows: Any = node.args[0]
    weight = _rows_of_results(node.args[1])
    assert sums is not None
    assert weight is not None
    assert int8.QLINEAR is not None
    assert int8.QLINEAR_PREPACK is not None
    zero_point = sums.zero_point
    if rows.meta["val"].dtype == torch.int8:
        rows = insert_call(node, CONVERT, insert_call(node, FLIP_SIGN, rows, -128), torch.uint8)
        zero_point += 128
    integers = contiguous(node, rows)
    given = insert_scales(node, QuantizedWeight(weight, 1.0, 0, 0, torch.float32))
    sizes = [size_hint(size) for size in integers.meta["val"].shape]
    packed = insert_call(node, int8.QLINEAR_PREPACK, contiguous(node, weight), sizes)
    arguments = (integers, 1.0, zero_point, packed, given.scales, given.zero_points, None)
    made = insert_call(node, int8.QLINEAR, *arguments, 1.0, 0, torch.float32, "none", [], "")
    dtype = sums.cast.meta["val"].dtype
    if dtype != torch.float32:
        made = insert_call(node, CONVERT, made, dtype)
    reader: Any = sums.cast.args[0]
    replace(sums.cast, made)
    erase_unread((reader, node))
