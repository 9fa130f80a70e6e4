"""The cache entry of one functional graph: a hit skips the stages from post-grad passes to LLVM.

Captured graphs that cannot be looked up before they are traced come here, and the forward of a function whose backward
has never run. Of processes that compile the same graph at a time, one does and the others wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.fx

from torchkiln.artifact import Artifact
from torchkiln.artifact.codec import decode, encode
from torchkiln.cache import Cache
from torchkiln.cache.key import CacheKey
from torchkiln.errors import ArtifactError, KilnError
from torchkiln.frontend.function_key import cache_of, environment_fields, shared_memory
from torchkiln.frontend.node_lines import nodes_of, with_lines, with_numbers
from torchkiln.graph.aliases import DONATED, STATIC_INPUT, TRACED_RESULTS
from torchkiln.graph.fake import fake_mode_of
from torchkiln.graph.graph_text import GraphText, NoTextError, size_lines
from torchkiln.graph.manager import PassManager
from torchkiln.graph.program_memory import NOTED, tensors_in_memory
from torchkiln.graph.saved_values import saved_for_backward
from torchkiln.graph.tangents import is_tangent
from torchkiln.graph.weights import PREPARED

_log = logging.getLogger(__name__)


def graph_entry(graph_module: torch.fx.GraphModule, kind: str, manager: PassManager) -> GraphEntry | None:
    """The entry of a functional graph as AOTAutograd made it; None where it is not cached."""
    settings = manager.settings
    cache = cache_of(settings)
    # Passes have numbers, which depend on the graphs before.
    if cache is None or settings.passes_limit is not None or any(isinstance(p, int) for p in settings.passes_skip):
        return None
    try:
        return GraphEntry(cache, _key(graph_module, kind, manager), graph_module)
    except NoTextError as error:
        _log.info("the %s graph is not cached, for %s", kind, error)
        return None


class GraphEntry:
    """The place of one functional graph in the cache."""

    def __init__(self, cache: Cache, key: CacheKey, graph_module: torch.fx.GraphModule) -> None:
        self.key = key
        self._cache = cache
        self._nodes = nodes_of(graph_module)

    @contextmanager
    def compiling(self) -> Iterator[Artifact | None]:
        """Yields the stored artifact, or None, and then this process compiles the graph while others wait."""
        found = self._decoded(self._cache.get(self.key))
        if found is not None:
            yield found
            return
        with self._cache.compiling(self.key) as payload:
            yield self._decoded(payload)

    def _decoded(self, payload: bytes | None) -> Artifact | None:
        try:
            return None if payload is None else with_lines(decode(payload), self._nodes)
        except KilnError as error:
            _log.warning("a cached graph is compiled again: %s", error)
            return None

    def store(self, artifact: Artifact) -> None:
        try:
            self._cache.put(self.key, encode(with_numbers(artifact, self._nodes)))
        except ArtifactError as error:
            _log.info("a compiled graph is not cached: %s", error)


def _key(graph_module: torch.fx.GraphModule, kind: str, manager: PassManager) -> CacheKey:
    text = GraphText(functional=True)
    mode = fake_mode_of(graph_module.graph)
    content = {
        "kind": kind,
        "graph": "\n".join(text.graph(graph_module)),
        "notes": "\n".join(_notes(graph_module.graph)),
        "sizes": "\n".join(size_lines(text, None if mode is None else mode.shape_env)),
    }
    return CacheKey("graph", {**content, **environment_fields(manager.settings, manager.target)})


def _notes(graph: torch.fx.Graph) -> Iterator[str]:
    """What is noted of inputs and results beside their metadata."""
    placeholders = graph.find_nodes(op="placeholder")
    yield from shared_memory([node.meta.get("val") for node in placeholders])
    for position, node in enumerate(placeholders):
        marks = {
            "tangent": is_tangent(node),
            "donated": node.meta.get(DONATED),
            "static": node.meta.get(STATIC_INPUT),
            "packed": node.meta.get(PREPARED),
        }
        if any(marks.values()):
            yield f"input {position} {' '.join(name for name, holds in marks.items() if holds)}"
    for number, node in enumerate(graph.nodes):
        if NOTED in node.meta:
            memories = tensors_in_memory(dict(node.kwargs), node.meta[NOTED])
            yield f"call {number} in memory {[memory and memory.number for _, memory in memories]}"
    output = graph.output_node()
    yield f"saved {sorted(saved_for_backward(output))}"
    first: dict[str, int] = {}
    for position, result in enumerate(output.meta.get(TRACED_RESULTS) or ()):
        if result is not None:
            tensor = first.setdefault(result.node, position)
            yield f"result {position} is traced as {tensor}{' in a tangent' if result.shows_tangent else ''}"
