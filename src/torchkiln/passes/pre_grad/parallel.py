"""Groups of equal calls that do not depend on each other, so that one call can do the work of all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch.fx

from torchkiln.passes.pre_grad.memory import Memory


def parallel_groups(
    memory: Memory, calls: Iterable[tuple[Hashable, torch.fx.Node]], at_most: int
) -> list[list[torch.fx.Node]]:
    """Calls with equal keys, two or more and ``at_most`` that many together, that can be made where the first one is.

    What they read is there by then and is not written until they read it. Their results may share memory: they neither
    leave the graph nor are written.
    """
    groups: dict[Hashable, list[list[torch.fx.Node]]] = {}
    for key, node in calls:
        if memory.is_returned(node) or memory.is_written_after(node):
            continue
        same = groups.setdefault(key, [])
        for group in same:
            if len(group) < at_most and _can_move(memory, node, group[0]):
                group.append(node)
                break
        else:
            same.append([node])
    return [group for same in groups.values() for group in same if len(group) > 1]


def _can_move(memory: Memory, node: torch.fx.Node, to: torch.fx.Node) -> bool:
    sources = node.all_input_nodes
    return all(memory.precedes(source, to) for source in sources) and memory.undisturbed(sources, to, node)
