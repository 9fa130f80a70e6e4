"""The cache entry of a captured graph: looked up before AOTAutograd traces it, written once its graphs are compiled.

A hit skips tracing, passes, partition, lowering and LLVM. Nothing imported here imports the compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.fx
from torch._guards import TracingContext

from torchkiln.artifact import CompiledFunction
from torchkiln.artifact.codec import decode_as, encode
from torchkiln.artifact.convention import StoredFunction
from torchkiln.cache import Cache, CacheKey, open_cache
from torchkiln.config import Settings
from torchkiln.errors import ArtifactError, KilnError
from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.frontend.dynamo_counters import count_captured_graph
from torchkiln.frontend.finished_call import finished_call, first_call_is_fake
from torchkiln.frontend.flat_inputs import has_nested_inputs
from torchkiln.frontend.function_key import cache_of, function_key, has_passes_of, shape_env_of
from torchkiln.frontend.node_lines import nodes_of, with_lines, with_numbers
from torchkiln.frontend.precompile import Precompilation
from torchkiln.frontend.size_guards import GuardNotes, NotStorableError, Tree, add_guards
from torchkiln.frontend.tracing_state import TracingModes, tracing_modes, tracing_state
from torchkiln.frontend.unfolding import UnfoldedEntries, Unfolding, load_graphs
from torchkiln.garbage import no_collections
from torchkiln.graph.fake import outside_tracing
from torchkiln.graph.graph_text import NoTextError
from torchkiln.recorder import Recorder, announce, is_observed, timed_stage
from torchkiln.runtime.direct_calls import direct_call
from torchkiln.target import Target

Function = Callable[..., Any]

# Functions of one captured graph for different sizes. As many as Dynamo compiles of one piece of code by default.
_MOST_VARIANTS = 8

_log = logging.getLogger(__name__)


def function_entry(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], settings: Settings, target: Target
) -> FunctionEntry | None:
    """The entry of a captured graph; None where it is not cached, with the reason in the log."""
    if is_observed():
        _tell_of_lookup(graph_module, inputs, settings, target)
    cache = cache_of(settings)
    if cache is None:
        return None
    try:
        if has_nested_inputs(inputs):
            raise NoTextError("inputs that are lists of tensors")
        if first_call_is_fake():  # Dynamo asks for AOTAutograd's metadata of each
            raise NoTextError("a bucket of gradients of a DDP module")
        return FunctionEntry(cache, graph_module, inputs, settings, target)
    except NoTextError as error:
        _log.info("a captured graph is not looked up in the cache before it is traced, for %s", error)
        return None


@dataclass(frozen=True)
class Lookup:
    """What observers get of a captured graph that the cache has or has not; a graph that is not cached has no key."""

    hit: bool
    cache: Cache | None = None
    key: CacheKey | None = None
    reason: str = ""


def _tell_of_lookup(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], settings: Settings, target: Target
) -> None:
    """Tell observers whether the cache has a captured graph: while somebody watches, it is compiled all the same."""
    cache = open_cache(settings)
    if cache is None:
        return
    try:
        # Those who watch may ask for times of steps, which the program by itself does not.
        key, _ = function_key(graph_module, inputs, replace(settings, profile=False), target)
    except NoTextError as error:
        announce("cache", Lookup(False, reason=f"not cached before it is traced, for {error}"))
        return
    announce("cache", Lookup(cache.folder.read(key.digest) is not None, cache, key))


class FunctionEntry:
    """The place of one captured graph in the cache. Made before it is compiled, where it was captured."""

    def __init__(
        self,
        cache: Cache,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        settings: Settings,
        target: Target,
    ) -> None:
        self.key, self._text = function_key(graph_module, inputs, settings, target)
        self._place = self.key
        self._cache, self._graph, self._settings = cache, graph_module, settings
        self._nodes = nodes_of(graph_module)
        self._shape_env = shape_env_of(inputs, graph_module.graph.find_nodes(op="placeholder"))
        self._notes = GuardNotes(self._shape_env)
        self._guards_of_aot = _guards_of_aot()
        self._guards: tuple[Tree, ...] | None = None
        self._made: tuple[CompiledFunction, bool] | None = None

    def unfolded(self) -> UnfoldedEntries | None:
        """Where forms of this function with refused layers left as they are have their entries; None without any.

        Graphs with symbolic sizes have no such forms, nor do functions that cannot be stored.
        """
        if self._guards is None or self._text.symbols:
            return None
        return UnfoldedEntries(self._cache, self._place, self._nodes)

    # Reading

    def load(
        self,
        compile_tangents: Callable[..., Function],
        compile_unfolded: Callable[[Unfolding], Function | None],
        precompiling: Precompilation | None = None,
    ) -> Function | None:
        """The stored function as the caller calls it; None where there is none that fits.

        ``compile_tangents`` as in :func:`finished_call`. ``compile_unfolded`` traces the captured graph and compiles it
        as :class:`Unfolding` asks, under the modes of now. ``precompiling`` takes the function too.
        """
        recorder = Recorder()
        with timed_stage("load from cache"), no_collections(), outside_tracing():
            call = self._load(recorder, compile_unfolded, precompiling)
        if call is None:
            return None
        count_captured_graph()
        return finished_call(call, self._settings, recorder, compile_tangents)

    def _load(
        self,
        recorder: Recorder,
        compile_unfolded: Callable[[Unfolding], Function | None],
        precompiling: Precompilation | None,
    ) -> CapturedCall | None:
        try:
            stored = self._fitting()
            if stored is None:
                return None
            function = self._with_lines(stored.function)
            self._guards = stored.guards
            prepares = function.weights is not None
            unfolding = self._unfolding(recorder, compile_unfolded, precompiling) if prepares else None
            call = self._loaded(function, recorder, unfolding, can_run_twice=stored.can_run_twice)
        except (KilnError, LookupError, TypeError, ValueError) as error:
            _log.warning("a cached function is compiled again: %s", error)
            return None
        if precompiling is not None:
            precompiling.compiled(function, call)
        return call

    def _unfolding(
        self,
        recorder: Recorder,
        compile_unfolded: Callable[[Unfolding], Function | None],
        precompiling: Precompilation | None,
    ) -> Unfolding | None:
        """What the loaded function does where a layer's weight is refused; it does not hold this object."""
        entries = self.unfolded()
        if entries is None:
            return None  # nor can it be compiled so
        return Unfolding(
            partial(_compile_as_captured, compile_unfolded, tracing_modes(), self.key.fields["state"]),
            recorder,
            self._settings,
            entries=lambda: entries,
            completed=() if precompiling is None else (precompiling.compiled_unfolded,),
        )

    def _fitting(self) -> StoredFunction | None:
        """The first of the stored functions whose guards hold, which are added; None leaves the place for another."""
        for place in _places(self.key):
            self._place = place
            payload = self._cache.get(place)
            if payload is None:
                return None
            stored = decode_as(payload, StoredFunction)
            if add_guards(stored.guards, self._shape_env, self._text.symbols):
                return stored
            _log.info("a cached function is for other sizes than these")
        return None

    def _with_lines(self, function: CompiledFunction) -> CompiledFunction:
        return function.with_graphs(lambda artifact: with_lines(artifact, self._nodes))

    def _loaded(
        self, function: CompiledFunction, recorder: Recorder, unfolding: Unfolding | None, *, can_run_twice: bool
    ) -> CapturedCall:
        graphs = load_graphs(function, recorder, self._settings)
        return CapturedCall(
            self._graph,
            function.convention.structure,
            recorder,
            direct=direct_call(function.convention, unfolding, **graphs),
            trains=function.backward is not None,
            can_run_twice=can_run_twice,
        )

    # Writing

    def traced(self) -> None:
        """Called when AOTAutograd has traced the graph: notes the guards that this took."""
        try:
            if _guards_of_aot() != self._guards_of_aot:
                raise NotStorableError("guards of AOTAutograd on its inputs")
            self._guards = self._notes.added(self._text.symbols)
        except NotStorableError as error:
            _log.info("a compiled function is not cached, for %s", error)
        self._write()

    def compiled(self, function: CompiledFunction, call: CapturedCall) -> None:
        """Called when all graphs of the function are compiled."""
        self._made = function, call.can_run_twice
        self._write()

    def _write(self) -> None:
        if self._guards is None or self._made is None:
            return
        function, can_run_twice = self._made
        self._made = None
        if not has_passes_of(self.key):
            _log.info("a compiled function is not cached, for passes that were registered while it was compiled")
            return
        stored = function.with_graphs(lambda artifact: with_numbers(artifact, self._nodes))
        try:
            self._cache.put(self._place, encode(StoredFunction(stored, can_run_twice, self._guards)))
        except ArtifactError as error:
            _log.info("a compiled function is not cached: %s", error)


def _places(key: CacheKey) -> Iterator[CacheKey]:
    """Where functions of one captured graph are that have guards of their own, such as for long and for short inputs.

    One place would be written in turns by a program that uses several: it would trace them in every process.
    """
    yield key
    for number in range(1, _MOST_VARIANTS):
        yield CacheKey(key.kind, {**key.fields, "variant": str(number)})


def _compile_as_captured(
    compile_unfolded: Callable[[Unfolding], Function | None], modes: TracingModes, state: str, unfolding: Unfolding
) -> Function | None:
    """Compile under the modes that the graph was captured in; None where the process traces it otherwise than then."""
    try:
        with modes.restored():
            return compile_unfolded(unfolding) if "\n".join(tracing_state()) == state else None
    except NoTextError as error:
        _log.info("a captured graph is not traced again, for %s", error)
        return None


def _guards_of_aot() -> int:
    context = TracingContext.try_get()
    return 0 if context is None else len(context.guards_context.aotautograd_guards)
