"""Splits and cats that undo each other: a cat of all parts of a split, a split of a cat at its seams, and the like.

``cat([p0, ..., pn])`` with all parts of ``split(x)`` in order reads ``x`` instead, also between other tensors;
``stack`` of ``unbind`` likewise, and a cat in a cat is one cat. What is left of a cat of one tensor is that tensor,
where nothing can tell the copy from the original. The parts of ``split(cat([a, b]))`` along the seams are ``a`` and
``b``, and those of ``unbind(stack([a, b]))`` too, under the same condition: in eager they have memory of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from torchkiln.graph.captured_calls import concatenated, is_call, operand
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.graph.nodes import replace
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, Replacement, rewrite_calls


def cancel_splits(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_calls(graph_module, _REWRITES, _simplify)


def _simplify(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    return _REWRITES[node.target](graph, node)


def _simplify_cat(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    given = concatenated(node, torch.cat)
    if given is None:
        return False
    parts, dim = given
    fewer = _flattened(graph, node, _without_splits(parts, dim), dim)
    if len(fewer) == 1 and _is_copy_of(graph, node, fewer[0]):
        replace(node, fewer[0])
        return True
    return fewer != parts and _replace_by_cat(graph, node, fewer, dim)


def _replace_by_cat(graph: CapturedGraph, node: torch.fx.Node, parts: list[torch.fx.Node], dim: int) -> bool:
    replacement = Replacement(graph, node)
    return replacement.take_place([node], [replacement.call(torch.cat, parts, dim=dim)])


def _without_splits(parts: list[torch.fx.Node], dim: int) -> list[torch.fx.Node]:
    """``parts`` with each complete run of parts of one split along ``dim`` replaced by the tensor that is split.

    The parts are views: reading them here and reading their source here is the same, whoever wrote it before.
    """
    result: list[torch.fx.Node] = []
    while parts:
        source, count = _split_at_start(parts, torch.split, dim) or (parts[0], 1)
        result.append(source)
        parts = parts[count:]
    return result


def _split_at_start(parts: list[torch.fx.Node], target: Any, dim: int) -> tuple[torch.fx.Node, int] | None:
    """What is split along ``dim``, and into how many parts, where ``parts`` begin with all parts of one split."""
    whole = operand(parts[0]) if is_call(parts[0], operator.getitem) else None
    source = operand(whole) if is_call(whole, target) and whole.kwargs.get("dim") == dim else None
    if whole is None or source is None:
        return None
    count = _part_count(whole)
    in_order = [_part_index(part, whole) for part in parts[:count]] == list(range(count))
    return (source, count) if count and in_order else None


def _part_count(whole: torch.fx.Node) -> int:
    value = whole.meta.get("example_value")
    return len(value) if isinstance(value, (tuple, list)) else 0


def _part_index(part: torch.fx.Node, whole: torch.fx.Node) -> int | None:
    index = part.args[1] if is_call(part, operator.getitem) and part.args[0] is whole else None
    return index if type(index) is int else None


def _flattened(graph: CapturedGraph, node: torch.fx.Node, parts: list[torch.fx.Node], dim: int) -> list[torch.fx.Node]:
    """``parts`` with the parts of a cat along the same dimension, made for this one only, in place of that cat."""
    result: list[torch.fx.Node] = []
    for part in parts:
        inner, inner_dim = concatenated(part, torch.cat) or ([], -1)
        alone = inner_dim == dim and set(part.users) == {node} and parts.count(part) == 1
        if alone and graph.have_one_type([node, part, *inner]) and graph.memory.undisturbed([*inner, part], part, node):
            result += inner
        else:
            result.append(part)
    return result


def _is_copy_of(graph: CapturedGraph, node: torch.fx.Node, source: torch.fx.Node) -> bool:
    memory = graph.memory
    return graph.alike(source, node) and memory.may_be_shared(node, source) and memory.same_region(source, node)


def _simplify_stack(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    parts, dim = concatenated(node, torch.stack) or ([], 0)
    source, count = (_split_at_start(parts, torch.unbind, dim) if parts else None) or (None, 0)
    if source is None or count != len(parts):
        return False
    if _is_copy_of(graph, node, source):
        replace(node, source)
        return True
    return _replace_by_cat(graph, node, [source], dim)  # one copy, laid out as cat does


def _simplify_split(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    joiner = torch.cat if node.target is torch.split else torch.stack
    whole = operand(node)
    sources, dim = concatenated(whole, joiner) or ([], 0)
    count = _part_count(node)
    if whole is None or not sources or node.kwargs.get("dim") != dim or len(sources) != count:
        return False
    readers = {part: _part_index(part, node) for part in node.users}
    if any(index not in range(count) for index in readers.values()):
        return False
    if not graph.have_one_type([*sources, whole] if joiner is torch.cat else sources):
        return False
    for index, (source, part) in enumerate(zip(sources, graph.value(node), strict=True)):
        if not _reads_alike(graph.value(source), part, exactly=index in readers.values()):
            return False
    # In eager, all parts of a cat need a gradient where one of its operands does.
    if len({graph.value(source).requires_grad for source in sources}) > 1:
        return False
    memory = graph.memory
    if not memory.undisturbed([*sources, whole], whole, node):
        return False
    if not all(memory.may_be_shared(whole, source) and memory.same_region(source, whole) for source in sources):
        return False
    replace(node, sources)
    return True


def _reads_alike(source: torch.Tensor, part: torch.Tensor, *, exactly: bool) -> bool:
    """Whether what is computed from ``source`` has the strides of what is computed from ``part``.

    A part of a cat has gaps between its rows, so the strides themselves differ; what is computed from it has none.
    Not ``exactly``: it is unused, the sizes are enough.
    """
    if source.dtype != part.dtype:
        return False
    if is_symbolic(source) or is_symbolic(part):
        return same_metadata(source, part)
    if source.shape != part.shape:
        return False
    return not exactly or torch.empty_like(source).stride() == torch.empty_like(part).stride()


_REWRITES: dict[Any, Callable[[CapturedGraph, torch.fx.Node], bool]] = {
    torch.cat: _simplify_cat,
    torch.stack: _simplify_stack,
    torch.split: _simplify_split,
    torch.unbind: _simplify_split,
}
