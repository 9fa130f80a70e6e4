"""Chains of operators of one family that come down to one: views of views, permutations, casts of casts.

Only what an operator reads changes here. What is left without a reader goes with dead code, and what became a no-op
(a permutation undone, a type cast back) with the no-ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.graph.dtypes import FLOATS, INTEGERS, INTEGERS_AND_BOOL
from torchkiln.graph.fake import is_row_major, is_symbolic, same_metadata, same_strides
from torchkiln.graph.operators import CASTS, named_operators

_aten = torch.ops.aten

_RESHAPES = frozenset(named_operators("view _unsafe_view"))
_SAME_ELEMENTS_IN_ORDER = _RESHAPES | set(named_operators("unsqueeze squeeze.default,dim,dims"))
_PERMUTES = frozenset(named_operators("permute transpose.int t"))


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
    if not isinstance(source, torch.fx.Node):
        return False
    if not all(isinstance(link.meta.get("val"), FakeTensor) for link in (node, inner, source)):
        return False
    if node.target in _RESHAPES and inner.target in _SAME_ELEMENTS_IN_ORDER:
        return _reshape_from(node, source)
    if node.target in _PERMUTES and inner.target in _PERMUTES:
        first = axes_of(inner)
        node.args, node.target = (source, [first[axis] for axis in axes_of(node)]), _aten.permute.default
        return True
    return node.target in CASTS and inner.target in CASTS and _cast_from(node, inner, source)


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
    if before.dtype.is_floating_point and after.dtype in INTEGERS:
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
    if source in FLOATS and target in FLOATS:
        narrow, wide = torch.finfo(source), torch.finfo(target)
        return narrow.eps >= wide.eps and narrow.tiny >= wide.tiny and narrow.max <= wide.max
    if source not in INTEGERS_AND_BOOL:
        return False
    low, high = _integer_range(source)
    if target in FLOATS:
        return max(-low, high) <= 2 / torch.finfo(target).eps
    if target not in INTEGERS_AND_BOOL:
        return False
    lowest, highest = _integer_range(target)
    return lowest <= low and high <= highest


def _integer_range(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
