"""Lines of the user's program in a cached artifact: stored as numbers of nodes, read as the lines of these nodes now.

A graph is the same wherever it was written, so its code serves other files and moved lines, and messages name those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from torchkiln.artifact import Artifact, with_sources
from torchkiln.graph.source import source_line
from torchkiln.graph.subgraphs import subgraphs


def nodes_of(graph_module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes of a graph, then those of its subgraphs."""
    return [node for module in (graph_module, *subgraphs(graph_module)) for node in module.graph.nodes]


def with_numbers(artifact: Artifact, nodes: Sequence[torch.fx.Node]) -> Artifact:
    """``artifact`` with the number of a node, ``%12``, in place of each line that one of ``nodes`` comes from."""
    first = {source_line(node): f"%{number}" for number, node in reversed(list(enumerate(nodes)))}
    return with_sources(artifact, {line: number for line, number in first.items() if line is not None})


def with_lines(artifact: Artifact, nodes: Sequence[torch.fx.Node]) -> Artifact:
    """What :func:`with_numbers` was given, with the lines that ``nodes`` come from here."""
    texts = [text for text in _sources_of(artifact) if text.startswith("%") and text[1:].isdecimal()]
    lines = {text: source_line(nodes[int(text[1:])]) for text in texts if int(text[1:]) < len(nodes)}
    return with_sources(artifact, {text: lines.get(text) or "a line that is not known" for text in texts})


def _sources_of(artifact: Artifact) -> set[str]:
    """The lines that ``artifact`` and the bodies of its higher-order operators name."""
    found = set(artifact.sources)
    for call in artifact.entry.python_calls:
        for body in getattr(call, "bodies", ()):
            found |= _sources_of(body.artifact)
    return found
