"""Inference graphs with layers left as they are, made when a call finds that these layers' weights are refused.

Each has a cache entry of its own, beside that of the function with all layers folded: what an entry holds follows from
its key, never from the weights that one process happened to have. Nothing imported here imports the compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from torchkiln.artifact import Artifact, CompiledFunction
from torchkiln.artifact.codec import decode_function, encode
from torchkiln.cache import Cache, CacheKey
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError, KilnError
from torchkiln.frontend.function_key import has_passes_of
from torchkiln.frontend.node_lines import with_lines, with_numbers
from torchkiln.garbage import no_collections
from torchkiln.graph.fake import outside_tracing
from torchkiln.recorder import Recorder, timed_stage
from torchkiln.runtime.accounting import account_for
from torchkiln.runtime.direct_calls import inference_graph
from torchkiln.runtime.executable import CompiledGraph, load

Function = Callable[..., Any]

CompletedUnfolded = Callable[[CompiledFunction], None]
"""Called with a function whose refused layers are left as they are, once it is compiled or loaded."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class UnfoldedEntries:
    """Where a cache has the unfolded forms of the function at ``place``; ``nodes`` are those that were captured."""

    cache: Cache
    place: CacheKey
    nodes: Sequence[torch.fx.Node]

    def load(self, unfolded: frozenset[int]) -> CompiledFunction | None:
        """The function with nothing folded into weights that are made of these inputs; None where there is none."""
        payload = self.cache.get(self._key(unfolded))
        if payload is None:
            return None
        return decode_function(payload).with_graphs(lambda artifact: with_lines(artifact, self.nodes))

    def store(self, unfolded: frozenset[int], function: CompiledFunction) -> None:
        if not has_passes_of(self.place):
            return

        def numbered(artifact: Artifact) -> Artifact:
            return with_numbers(artifact, self.nodes)

        try:
            self.cache.put(self._key(unfolded), encode(function.with_graphs(numbered)))
        except ArtifactError as error:
            _log.info("a compiled function is not cached: %s", error)

    def _key(self, unfolded: frozenset[int]) -> CacheKey:
        return CacheKey("unfolded", {**self.place.fields, "unfolded": " ".join(map(str, sorted(unfolded)))})


class Unfolding:
    """Makes an inference graph anew with refused weights left as they are: from the cache or by ``compile_graph``.

    That is given the unfolding for further refusals, whose ``unfolded`` are the inputs that nothing is to be folded
    into, and tells it of the function it compiled (:meth:`compiled`). Where it gives None, the graph runs as captured.
    ``entries`` says where the cache has such graphs, once a call asks. Graphs count as those of ``recorder``.
    """

    def __init__(
        self,
        compile_graph: Callable[[Unfolding], Function | None],
        recorder: Recorder,
        settings: Settings,
        *,
        entries: Callable[[], UnfoldedEntries | None] = lambda: None,
        completed: Sequence[CompletedUnfolded] = (),
        unfolded: frozenset[int] = frozenset(),
    ) -> None:
        self._compile, self.recorder, self._settings = compile_graph, recorder, settings
        self._entries, self._completed, self.unfolded = entries, completed, unfolded

    def __call__(self, refused: frozenset[int]) -> Function | None:
        further = Unfolding(
            self._compile,
            self.recorder,
            self._settings,
            entries=self._entries,
            completed=self._completed,
            unfolded=self.unfolded | refused,
        )
        entries = self._entries()
        found = None if entries is None else further._load(entries)
        return self._compile(further) if found is None else found

    def compiled(self, function: CompiledFunction) -> None:
        """Called with the function whose inference graph was compiled with ``unfolded``."""
        entries = self._entries()
        if entries is not None:
            entries.store(self.unfolded, function)
        self._tell(function)

    def _load(self, entries: UnfoldedEntries) -> Function | None:
        with timed_stage("load from cache"), no_collections(), outside_tracing():
            try:
                function = entries.load(self.unfolded)
                if function is None:
                    return None
                graphs = load_graphs(function, self.recorder, self._settings)
            except (KilnError, LookupError, TypeError, ValueError) as error:
                _log.warning("a cached function is compiled again: %s", error)
                return None
        self._tell(function)
        return inference_graph(function.convention, self, **graphs)

    def _tell(self, function: CompiledFunction) -> None:
        for completed in self._completed:
            completed(function)


def load_graphs(function: CompiledFunction, recorder: Recorder, settings: Settings) -> dict[str, CompiledGraph]:
    """The graphs of a function from the cache, ready to call in this process, counted as those of ``recorder``."""
    function.reject_incomplete()
    told = recorder if settings.cuda_graphs else None
    artifacts = function.graphs()
    graphs = {
        name: load(artifact, compilation=recorder.id, cuda_graphs=told if name != "weights" else None)
        for name, artifact in artifacts.items()
    }
    for summary in (artifact.summary for artifact in artifacts.values()):
        if summary is not None:
            account_for(summary, recorder, keep_memory=settings.keep_memory)
    return graphs
