"""Taking apart and putting together again: cat of all parts of a split, split of a cat at its joints, and the like.

``cat([p0, ..., pn])`` with all parts of ``split(x)`` in order reads ``x`` instead, also between other tensors;
``stack`` of ``unbind`` likewise, and a cat in a cat is one cat. What is left of a cat of one tensor is that tensor,
where nobody can tell the copy from the original. The parts of ``split(cat([a, b]))`` along the joints are ``a`` and
``b``, and those of ``unbind(stack([a, b]))`` too, under the same condition: in eager they have memory of their own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.captured_calls import is_call, joined, operand, replace, tensor_of, value_of
from torchkiln.graph.captured_memory import Memory
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.passes.pre_grad.replacement import Replacement


def cancel_splits(graph_module: torch.fx.GraphModule) -> bool:
    memory = Memory(graph_module)
    if not memory.steady:
        return False
    changed = False
    for node in list(graph_module.graph.nodes):
        if is_call(node, torch.cat):
            changed |= _join_less(graph_module, memory, node)
        elif is_call(node, torch.stack):
            changed |= _stack_of_unbind(graph_module, memory, node)
        elif is_call(node, torch.split) or is_call(node, torch.unbind):
            changed |= _parts_of_joined(graph_module, memory, node)
    return changed


def _join_less(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node) -> bool:
    given = joined(node, torch.cat)
    if given is None:
        return False
    parts, dim = given
    fewer = _flattened(graph_module, memory, node, _rejoined(parts, dim), dim)
    if len(fewer) == 1 and _is_copy_of(graph_module, memory, node, fewer[0]):
        replace(node, fewer[0])
        return True
    return fewer != parts and _replace_by_cat(graph_module, memory, node, fewer, dim)


def _replace_by_cat(
    graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node, parts: list[torch.fx.Node], dim: int
) -> bool:
    replacement = Replacement(graph_module, memory, node)
    return replacement.take_place([node], [replacement.call(torch.cat, parts, dim=dim)])


def _rejoined(parts: list[torch.fx.Node], dim: int) -> list[torch.fx.Node]:
    """``parts`` with each complete run of parts of one split along ``dim`` replaced by what was split.

    The parts are views: reading them here and reading their source here is the same, whoever wrote it before.
    """
    result: list[torch.fx.Node] = []
    position = 0
    while position < len(parts):
        whole = _split_that_starts(parts[position], torch.split, dim)
        source = None if whole is None else operand(whole)
        count = 0 if whole is None else _part_count(whole)
        if source is not None and _all_in_order(parts[position : position + count], whole, count):
            result.append(source)
            position += count
        else:
            result.append(parts[position])
            position += 1
    return result


def _split_that_starts(part: torch.fx.Node, target: Any, dim: int) -> torch.fx.Node | None:
    """The split along ``dim`` of which ``part`` is the first part."""
    if not is_call(part, operator.getitem) or part.args[1] != 0:
        return None
    whole = operand(part)
    return whole if is_call(whole, target) and whole.kwargs.get("dim") == dim else None


def _part_count(whole: torch.fx.Node) -> int:
    value = whole.meta.get("example_value")
    return len(value) if isinstance(value, (tuple, list)) else 0


def _all_in_order(parts: list[torch.fx.Node], whole: torch.fx.Node | None, count: int) -> bool:
    return count > 0 and [_part_number(part, whole) for part in parts] == list(range(count))


def _part_number(part: torch.fx.Node, whole: torch.fx.Node | None) -> int | None:
    number = part.args[1] if is_call(part, operator.getitem) and part.args[0] is whole else None
    return number if type(number) is int else None


def _flattened(
    graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node, parts: list[torch.fx.Node], dim: int
) -> list[torch.fx.Node]:
    """``parts`` with those of a cat along the same dimension, made for this one only, in place of that cat."""
    result: list[torch.fx.Node] = []
    for part in parts:
        inner = joined(part, torch.cat)
        if (
            inner is not None
            and inner[1] == dim
            and set(part.users) == {node}
            and parts.count(part) == 1
            and _one_type(graph_module, [node, part, *inner[0]])
            and memory.undisturbed([*inner[0], part], part, node)
        ):
            result += inner[0]
        else:
            result.append(part)
    return result


def _one_type(graph_module: torch.fx.GraphModule, nodes: list[torch.fx.Node]) -> bool:
    tensors = [tensor_of(graph_module, node) for node in nodes]
    # Of one rank too: an empty vector may stand among tensors of any rank.
    kinds = {None if tensor is None else (tensor.dtype, tensor.dim()) for tensor in tensors}
    return None not in kinds and len(kinds) == 1


def _is_copy_of(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node, source: torch.fx.Node) -> bool:
    alike = same_metadata(value_of(graph_module, source), value_of(graph_module, node))
    return alike and memory.may_be_shared(node, source) and memory.same_region(source, node)


def _stack_of_unbind(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node) -> bool:
    given = joined(node, torch.stack)
    whole = None if given is None else _split_that_starts(given[0][0], torch.unbind, given[1])
    if given is None or whole is None or not _all_in_order(given[0], whole, _part_count(whole)):
        return False
    source = operand(whole)
    if source is None:
        return False
    if _is_copy_of(graph_module, memory, node, source):
        replace(node, source)
        return True
    return _replace_by_cat(graph_module, memory, node, [source], given[1])  # one copy, laid out as cat does


def _parts_of_joined(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node) -> bool:
    joiner = torch.cat if node.target is torch.split else torch.stack
    whole = operand(node)
    given = joined(whole, joiner)
    count = _part_count(node)
    if whole is None or given is None or node.kwargs.get("dim") != given[1] or len(given[0]) != count:
        return False
    sources = given[0]
    readers = [(part, _part_number(part, node)) for part in node.users]
    if any(number is None or not 0 <= number < count for _, number in readers):
        return False
    if not _one_type(graph_module, [*sources, whole] if joiner is torch.cat else sources):
        return False
    read = {number for _, number in readers}
    for index, (source, part) in enumerate(zip(sources, value_of(graph_module, node), strict=True)):
        if not _reads_alike(tensor_of(graph_module, source), part, exactly=index in read):
            return False
    # What is joined with something that needs a gradient needs one too, as far as eager is concerned.
    if len({value_of(graph_module, source).requires_grad for source in sources}) > 1:
        return False
    if not memory.undisturbed([*sources, whole], whole, node):
        return False
    if not all(memory.may_be_shared(whole, source) and memory.same_region(source, whole) for source in sources):
        return False
    for part, number in readers:
        assert number is not None
        replace(part, sources[number])
    node.graph.erase_node(node)
    return True


def _reads_alike(source: torch.Tensor | None, part: torch.Tensor, *, exactly: bool) -> bool:
    """Whether what is computed from ``source`` has the strides of what is computed from ``part``.

    A part of a cat has gaps between its rows, so the strides themselves differ; what is computed from it has none.
    Not ``exactly``: nobody reads it, the sizes are enough.
    """
    if source is None or source.dtype != part.dtype:
        return False
    if is_symbolic(source) or is_symbolic(part):
        return same_metadata(source, part)
    if source.shape != part.shape:
        return False
    return not exactly or torch.empty_like(source).stride() == torch.empty_like(part).stride()
