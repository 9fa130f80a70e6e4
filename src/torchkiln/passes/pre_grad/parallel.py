"""Groups of equal calls that do not depend on each other, so that one call can do the work of all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch.fx

from torchkiln.graph.captured_memory import Memory


def parallel_groups(
    memory: Memory, calls: Iterable[tuple[Hashable, torch.fx.Node]], at_most: int
) -> list[list[torch.fx.Node]]:
    """Calls with equal keys, two or more and ``at_most`` that many together, that can be made where the first one is.

    ``calls`` are in the order of the graph.
    What they read is there by then and is not written until they read it. Their results may share memory: they neither
    leave the graph nor are written.
    """
    groups: dict[Hashable, list[list[torch.fx.Node]]] = {}
    for key, node in calls:
        if memory.is_returned(node) or memory.is_written_after(node):
            continue
        same = groups.setdefault(key, [])
        sources = node.all_input_nodes
        for group in _after(memory, sources, same):
            if len(group) < at_most and memory.undisturbed(sources, group[0], node):
                group.append(node)
                break
        else:
            same.append([node])
    return [group for same in groups.values() for group in same if len(group) > 1]


def _after(
    memory: Memory, sources: Sequence[torch.fx.Node], groups: Sequence[list[torch.fx.Node]]
) -> Sequence[list[torch.fx.Node]]:
    """The groups that begin when all ``sources`` are there: the last ones, since groups are in the graph's order.

    Looked for from the end: in a chain of layers none but the last is, however many there are.
    """
    begin = len(groups)
    while begin and all(memory.precedes(source, groups[begin - 1][0]) for source in sources):
        begin -= 1
    return groups[begin:]
