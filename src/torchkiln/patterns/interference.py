"""What stands against replacing a match: nodes outside that read what it computes, or write what it reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch.fx

from torchkiln.graph.aliases import memory_root, view_source
from torchkiln.graph.effects import has_effect, mutated_arguments
from torchkiln.patterns.index import GraphIndex

_Nodes = Mapping[torch.fx.Node, None]


def interference(
    index: GraphIndex, nodes: _Nodes, outputs: Collection[torch.fx.Node], exclusive: Sequence[torch.fx.Node]
) -> Iterator[tuple[torch.fx.Node, str]]:
    """The nodes in the way of a match of ``nodes``, and why; only the match may read ``exclusive`` captures."""
    for node in nodes:
        outside = _reader_outside(node, nodes)
        if outside is not None and node not in outputs and not _costs_nothing(node, nodes):
            yield node, f"{node.name} is also read by {outside.name}, outside of the match"
    for node in exclusive:
        outside = _reader_outside(node, nodes)
        if outside is not None:
            yield node, f"{node.name} must be read by the match alone and is also read by {outside.name}"
    reader = _reader_of_written(nodes)
    if reader is not None:
        yield reader, f"{reader.name} reads memory that the match writes"
    writer = _writer_between(nodes, index.writers())
    if writer is not None:
        yield writer, f"{writer.name} writes to memory of the match between its nodes"


def _reader_outside(node: torch.fx.Node, nodes: _Nodes) -> torch.fx.Node | None:
    for user in node.users:
        if user not in nodes:
            return user
    return None


def _costs_nothing(node: torch.fx.Node, nodes: _Nodes) -> bool:
    """Whether a node of a match may stay for others: a tensor made from numbers alone, or a view.

    A view of what the match computes is not one of these, as that would be computed a second time.
    """
    root = memory_root(node)
    return root not in nodes or (not root.all_input_nodes and not has_effect(root))


def _reader_of_written(nodes: _Nodes) -> torch.fx.Node | None:
    """A node outside a match that reads, through the tensor itself or a view of it, memory that the match writes to."""
    pending = [memory_root(written) for node in nodes for written in mutated_arguments(node)]
    for value in pending:
        for user in value.users:
            if view_source(user) is value:
                pending.append(user)
            elif user not in nodes:
                return user
    return None


def _writer_between(nodes: _Nodes, writers: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """A node between those of a match, and not one of them, that writes to memory which one of them reads."""
    if not writers:  # in most graphs: they are functional
        return None
    first, last = min(nodes), max(nodes)
    between = sorted(node for node in writers if first < node < last and node not in nodes)
    memory = {memory_root(value) for inner in nodes for value in (inner, *inner.all_input_nodes)} if between else set()
    return next((w for w in between if any(memory_root(v) in memory for v in mutated_arguments(w))), None)
