"""Groups of equal calls that do not depend on each other, so that one call can do the work of all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.fx

from torchkiln.graph.captured_memory import Memory
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, Replacement


def combine_parallel_calls(
    graph_module: torch.fx.GraphModule,
    target: Callable[..., Any],
    key: Callable[[CapturedGraph, torch.fx.Node], Hashable | None],
    combine: Callable[[CapturedGraph, list[torch.fx.Node]], bool],
    at_most: int,
) -> bool:
    """Call ``combine`` on each group of calls of ``target``; returns whether one changed the graph.

    A group is two or more calls, but not more than ``at_most``, with equal keys that are not None. All can be made
    where the first one is: what they read is there by then and is not written until they read it. Their results may
    share memory: they neither leave the graph nor are written.
    """
    graph = CapturedGraph(graph_module)
    memory = graph.memory
    groups: dict[Hashable, list[list[torch.fx.Node]]] = {}
    for node in graph_module.graph.find_nodes(op="call_function", target=target) if memory.steady else ():
        found = key(graph, node)
        if found is None or memory.is_returned(node) or memory.is_written_after(node):
            continue
        same = groups.setdefault(found, [])
        sources = node.all_input_nodes
        for group in _after(memory, sources, same):
            if len(group) < at_most and memory.undisturbed(sources, group[0], node):
                group.append(node)
                break
        else:
            same.append([node])
    changed = False
    for group in (group for same in groups.values() for group in same if len(group) > 1):
        changed |= combine(graph, group)
    return changed


def _after(
    memory: Memory, sources: Sequence[torch.fx.Node], groups: Sequence[list[torch.fx.Node]]
) -> Sequence[list[torch.fx.Node]]:
    """The groups that begin when all ``sources`` are there: the last ones, since groups are in graph order.

    Searched from the end: in a chain of layers only the last one can be such a group.
    """
    begin = len(groups)
    while begin and all(memory.precedes(source, groups[begin - 1][0]) for source in sources):
        begin -= 1
    return groups[begin:]


def take_slices(replacement: Replacement, group: Sequence[torch.fx.Node], stacked: torch.fx.Node) -> bool:
    """Replace each call of ``group`` by its slice of ``stacked`` along dimension 0, unless the results would differ."""
    parts = [replacement.call(torch.select, stacked, dim=0, index=index) for index in range(len(group))]
    return replacement.take_place(group, parts)
