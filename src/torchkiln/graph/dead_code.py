"""Removal of nodes nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx


def eliminate_dead_code(graph: torch.fx.Graph, is_live: Callable[[torch.fx.Node], bool]) -> bool:
    """Erase every node without users for which ``is_live`` is false; returns whether any was.

    One walk from the end is enough: erasing a node can only make earlier nodes dead.
    """
    changed = False
    for node in reversed(graph.nodes):
        if not node.users and not is_live(node):
            graph.erase_node(node)
            changed = True
    return changed
