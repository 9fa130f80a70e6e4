"""Redundant copies: of a tensor onto one just like it, of a part to where it is, of all elements.

Assignments to parts leave them behind when torch makes a graph functional: ``x[:, :, 2:3] = v`` writes ``v`` into a
part of a part of everything, and puts each of the three back.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.effects import mutated_arguments
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.nodes import calls_of, replace
from torchkiln.passes.post_grad.parts import WRITES_OF_PARTS, written_part

_aten = torch.ops.aten


def remove_redundant_copies(graph_module: torch.fx.GraphModule) -> bool:
    """Read the source instead of the copy, where both look the same and nothing can write to one of the two."""
    graph = graph_module.graph
    found = calls_of(graph, _aten.copy.default, *WRITES_OF_PARTS)
    if not found:
        return False
    aliases = Aliases(graph)
    returned = set(aliases.returned)
    changed = False
    for node in found:
        source = _stands_for(node)
        if source is None or not same_metadata(source.meta.get("val"), node.meta.get("val")):
            continue
        root = aliases.root(source)
        if node in aliases.written or node in aliases.read_as_storage:
            continue
        if node in returned:
            # The user may write into what is returned, which must not show anywhere else.
            if source is not root or root.op != "call_function" or root in returned:
                continue
            returned.add(root)
        if root in aliases.written and not _read_before_written(graph, aliases, root, node):
            continue
        replace(node, source)
        changed = True
    return changed


def _stands_for(node: torch.fx.Node) -> torch.fx.Node | None:
    """What ``node`` is a copy of, element for element, if anything."""
    if node.target is _aten.copy.default:
        source = node.args[1]
        return source if isinstance(source, torch.fx.Node) else None
    base, value, part = node.args[0], node.args[1], written_part(node)
    if part is None or not isinstance(base, torch.fx.Node) or not isinstance(value, torch.fx.Node):
        return None
    if part.is_shown_by(value, base):
        return base
    if part.view is _aten.slice.Tensor and _is_everything(base, *part.parameters):
        return value
    return None


def _is_everything(base: torch.fx.Node, dim: Any, start: Any, end: Any, step: Any) -> bool:
    if start not in (None, 0) or isinstance(start, torch.fx.Node) or step != 1 or not isinstance(dim, int):
        return False
    if end is None or (isinstance(end, int) and end == sys.maxsize):
        return True
    size = base.meta["val"].shape[dim]
    return isinstance(size, int) and isinstance(end, int) and end >= size


def _read_before_written(graph: torch.fx.Graph, aliases: Aliases, root: torch.fx.Node, copy: torch.fx.Node) -> bool:
    """Whether the last reader of ``copy``, or of a view of it, comes before the first write into ``root``."""
    written = False
    for node in graph.nodes:
        if written and any(aliases.root(source) is copy for source in node.all_input_nodes):
            return False
        written = written or any(aliases.root(value) is root for value in mutated_arguments(node))
    return True
