"""Chains of operators of one family that come down to one: views of views, turned axes turned again, casts of casts.

Only where an operator reads from changes here. What is left without a reader goes with dead code, and what became a
no-op (axes turned back, a type cast back) with the no-ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.graph.fake import is_row_major, is_symbolic, same_metadata, same_strides
from torchkiln.graph.operators import CASTS

_aten = torch.ops.aten

_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default})
_SAME_ELEMENTS_IN_ORDER = _RESHAPES | {
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
}
_TURNS = frozenset({_aten.permute.default, _aten.transpose.int, _aten.t.default})

# Bits of the significand, and the smallest and the largest exponent of a normal number.
_FLOAT_RANGE = {
    torch.float16: (11, -14, 15),
    torch.bfloat16: (8, -126, 127),
    torch.float32: (24, -126, 127),
    torch.float64: (53, -1022, 1023),
}
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def collapse_chains(graph_module: torch.fx.GraphModule) -> bool:
    """Let every link of a chain read from where the chain begins; returns whether any was found."""
    changed = False
    for node in list(graph_module.graph.nodes):
        while node.op == "call_function" and _skip_a_link(node):
            changed = True
    return changed


def _skip_a_link(node: torch.fx.Node) -> bool:
    inner = node.args[0] if node.args else None
    if not isinstance(inner, torch.fx.Node) or inner.op != "call_function" or not inner.args:
        return False
    source = inner.args[0]
    if not isinstance(source, torch.fx.Node) or not _have_values(node, inner, source):
        return False
    if node.target in _RESHAPES and inner.target in _SAME_ELEMENTS_IN_ORDER:
        return _reshape_from(node, source)
    if node.target in _TURNS and inner.target in _TURNS:
        return _turn_from(node, inner, source)
    return node.target in CASTS and inner.target in CASTS and _cast_from(node, inner, source)


def _have_values(*nodes: torch.fx.Node) -> bool:
    return all(isinstance(node.meta.get("val"), FakeTensor) for node in nodes)


def _reshape_from(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    before, after = source.meta["val"], node.meta["val"]
    # Memory in order shows in any shape, whatever the sizes are; otherwise torch would have to compare symbolic sizes.
    in_order = is_row_major(before) and is_row_major(after)
    symbolic = is_symbolic(before) or is_symbolic(after)
    if symbolic and not in_order:
        return False
    if symbolic or not in_order:
        shape = torch.fx.map_arg(node.args[1], lambda size: size.meta["val"])
        try:
            with before.fake_mode, torch.no_grad():
                viewed = _aten.view.default(before, shape)
        except (RuntimeError, ValueError):
            return False  # its memory cannot be shown in that shape without the step between
        if not same_metadata(viewed, after):
            return False  # the same sizes may be written as other expressions
    node.update_arg(0, source)
    return True


def _turn_from(node: torch.fx.Node, inner: torch.fx.Node, source: torch.fx.Node) -> bool:
    first, second = axes_of(inner), axes_of(node)
    node.target = _aten.permute.default
    node.args = (source, [first[axis] for axis in second])
    return True


def axes_of(node: torch.fx.Node) -> list[int]:
    """Which axis of its argument each axis of a ``permute``, ``transpose`` or ``t`` is."""
    dims = node.meta["val"].dim()
    if node.target is _aten.permute.default:
        order = node.args[1]
        assert isinstance(order, Sequence)
        return [axis % dims for axis in order]
    axes = list(range(dims))
    if dims > 1:
        swapped: Any = (0, 1) if node.target is _aten.t.default else node.args[1:3]
        first, second = swapped
        axes[first], axes[second] = axes[second], axes[first]
    return axes


def _cast_from(node: torch.fx.Node, inner: torch.fx.Node, source: torch.fx.Node) -> bool:
    before, between, after = (link.meta["val"] for link in (source, inner, node))
    if not _casts_type_only(inner) or not _casts_type_only(node) or not is_exact_cast(before.dtype, between.dtype):
        return False
    if before.dtype.is_floating_point and after.dtype in _INTEGERS and after.dtype is not torch.bool:
        return False  # what is out of range of the integers depends on the instruction, and so on the type between
    if not same_strides(before, between):
        return False  # the step between lays the elements out anew
    node.update_arg(0, source)
    return True


def _casts_type_only(node: torch.fx.Node) -> bool:
    return node.target is not _aten._to_copy.default or node.kwargs.keys() == {"dtype"}


def is_exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every value of type ``source`` is one of type ``target``."""
    if source == target:
        return True
    if source in _FLOAT_RANGE:
        if target not in _FLOAT_RANGE:
            return False
        (bits, low, high), (wider, lowest, highest) = _FLOAT_RANGE[source], _FLOAT_RANGE[target]
        return bits <= wider and lowest <= low and high <= highest
    if source not in _INTEGERS:
        return False
    low_value, high_value = _integer_range(source)
    if target in _FLOAT_RANGE:
        bits, _, highest = _FLOAT_RANGE[target]
        return max(-low_value, high_value) <= 1 << min(bits, highest)
    if target not in _INTEGERS:
        return False
    lowest_value, highest_value = _integer_range(target)
    return lowest_value <= low_value and high_value <= highest_value


def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max
