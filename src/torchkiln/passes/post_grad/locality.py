"""Nodes next to their first reader, so that results live in memory for a shorter time.

Graphs come in the order the user's program ran. A value computed early and read late is live all the way. Computed
right before it is read, it is not, unless its inputs have to stay live instead. For inference only: the order of a
forward and a backward graph is the partition's.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases, view_source
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import is_symbolic


def move_to_readers(graph_module: torch.fx.GraphModule) -> bool:
    """Move what can be made later without keeping more memory for it; calls with effects stay where they are."""
    graph = graph_module.graph
    aliases = Aliases(graph)
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        last.update((aliases.root(source), node) for source in node.all_input_nodes)
    changed = False
    effect: torch.fx.Node | None = None
    for node in reversed(list(graph.nodes)):
        if not _is_movable(node, aliases):
            if node.op == "call_function" and has_effect(node):
                effect = node
            continue
        first = min(node.users)
        if effect is not None and effect < first and not _cannot_fail(node):
            continue  # what fails must do so before anything is written, as in eager
        if first is node.next or not _frees_memory(node, first, aliases, last):
            continue
        first.prepend(node)
        for source in node.all_input_nodes:
            root = aliases.root(source)
            if last[root] < node:
                last[root] = node
        changed = True
    return changed


def _is_movable(node: torch.fx.Node, aliases: Aliases) -> bool:
    if node.op != "call_function" or not node.users or has_effect(node) or node.meta.get("unbacked_bindings"):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return False
    # Memory that is written is read and seen in the order of the graph.
    return not aliases.any_written((node, *node.all_input_nodes))


def _cannot_fail(node: torch.fx.Node) -> bool:
    """Whether ``node`` computes something for any values: indices read from a tensor may be out of range."""
    target = node.target
    return target is operator.getitem or view_source(node) is not None or torch.Tag.pointwise in target.tags  # type: ignore[union-attr]


def _frees_memory(
    node: torch.fx.Node, first: torch.fx.Node, aliases: Aliases, last: dict[torch.fx.Node, torch.fx.Node]
) -> bool:
    """Whether, until ``first`` runs, ``node`` itself takes no less memory than what must be kept to make it then.

    When it is the same, what is kept may move too.
    """
    if view_source(node) is not None or node.target is operator.getitem:
        return True  # nothing is made
    kept = 0
    for root in {aliases.root(source) for source in node.all_input_nodes}:
        if root.op != "call_function" or root in aliases.returned or not last[root] < first:
            continue  # there anyway
        size = _bytes(root)
        if size is None:
            return False
        kept += size
    size = _bytes(node)
    return kept == 0 or (size is not None and kept <= size)


def _bytes(node: torch.fx.Node) -> int | None:
    """The size of a tensor or of several; None where it is not known while compiling."""
    value = node.meta.get("val")
    if is_symbolic(value):
        return None
    values = value if isinstance(value, (list, tuple)) else (value,)
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
