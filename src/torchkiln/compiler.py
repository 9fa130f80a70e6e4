"""The flow: a captured graph in, native code out.

    pre-grad passes -> AOTAutograd -> joint passes -> partition          compile_fx
    post-grad passes -> lowering -> schedule -> codegen -> load          compile_fx_inner, once per functional graph

Each stage is a function of its input and the settings. A failure in one becomes a CompileError that names the stage,
the node and the user's line; with ``fallback`` on, the graph then runs eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchkiln import config
from torchkiln.artifact import Artifact, CompiledFunction, GraphSummary
from torchkiln.codegen.llvm import generate
from torchkiln.config import Settings
from torchkiln.errors import (
    CompileError,
    FallbackWarning,
    NodeFailure,
    OptionError,
    PassFailure,
    first_line,
    warn_user,
)
from torchkiln.frames import with_room_for_frames
from torchkiln.frontend.advice import advise_tf32
from torchkiln.frontend.aot import (
    Partition,
    keep_saved_tensors,
    keep_versions_of_outputs,
    static_input_indices,
    takes_list,
    trace_with_autograd,
    with_one_list,
)
from torchkiln.frontend.call_builder import CallBuilder
from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.frontend.compile_session import compile_session
from torchkiln.frontend.constant_floats import capture_without_constant_floats
from torchkiln.frontend.dual_numbers import as_dual_numbers
from torchkiln.frontend.dynamo_exceptions import breaks_the_graph, is_for_dynamo
from torchkiln.frontend.eager_graphs import with_native_results
from torchkiln.frontend.finished_call import finished_call
from torchkiln.frontend.flat_inputs import FlatGraph, flatten_inputs, has_nested_inputs
from torchkiln.frontend.flat_outputs import flatten_outputs
from torchkiln.frontend.forward_mode import trace_tangents
from torchkiln.frontend.function_entry import FunctionEntry, function_entry
from torchkiln.frontend.graph_entry import graph_entry
from torchkiln.frontend.inference_only import reject_training
from torchkiln.frontend.overlapping_writes import rewrite_overlapping_writes
from torchkiln.frontend.precompile import Precompilation
from torchkiln.frontend.process_start import start
from torchkiln.frontend.reproductions import reproduction_command
from torchkiln.frontend.resized_storages import reject_resizes_after_writes
from torchkiln.frontend.specialize import SpecializedGraphs, has_symbolic_inputs, specialize
from torchkiln.frontend.unfolding import CompletedUnfolded, UnfoldedEntries, Unfolding
from torchkiln.garbage import no_collections
from torchkiln.graph.aliases import STATIC_INPUT, TRACED_RESULTS, TracedResult, traced_results
from torchkiln.graph.decompositions import decompositions
from torchkiln.graph.fake import is_symbolic, outside_tracing
from torchkiln.graph.foldable import has_checks
from torchkiln.graph.kept_graphs import KeptGraph, keep_graph
from torchkiln.graph.manager import PassManager
from torchkiln.graph.subgraphs import copy_graph_module, operations
from torchkiln.graph.weights import mark_weights
from torchkiln.ir.native_calls import is_native
from torchkiln.ir.program import ExternCall
from torchkiln.ir.verify import verify_program
from torchkiln.lowering import lower
from torchkiln.native.library_pages import release_library_pages
from torchkiln.partition import min_cut_rematerialization_partition
from torchkiln.partition.hoisting import Hoisted, hoist
from torchkiln.passes import reject_unknown_passes
from torchkiln.passes.joint import JOINT
from torchkiln.passes.library_calls import matmul_records
from torchkiln.passes.post_grad import POST_GRAD
from torchkiln.passes.pre_grad import KEEP_SHARING, PRE_GRAD
from torchkiln.recorder import Recorder, timed_stage
from torchkiln.runtime.accounting import account_for
from torchkiln.runtime.batched_gradients import with_batched_gradients
from torchkiln.runtime.direct_calls import results_in, with_nested_inputs
from torchkiln.runtime.executable import load
from torchkiln.runtime.prepared_weights import PreparedGraph
from torchkiln.schedule import schedule
from torchkiln.schedule.plan import Launch, Plan, all_steps
from torchkiln.schedule.verify import verify_plan
from torchkiln.stats import counted

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class CapturedGraph:
    """What observers get of a captured graph before it is compiled, and with what it was captured."""

    graph_module: torch.fx.GraphModule
    inputs: Sequence[Any]


@dataclass(frozen=True)
class FunctionalGraph:
    """What observers get of a functional graph before it is compiled; what follows, until it is loaded, is about it."""

    kind: str
    graph_module: torch.fx.GraphModule


def functional_kind(*, is_backward: bool, is_inference: bool, prepares_weights: bool) -> str:
    """What a functional graph is, by what an ``inner_compile`` is told of it."""
    return "weights" if prepares_weights else "backward" if is_backward else "inference" if is_inference else "forward"


def compile_fx_inner(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    is_backward: bool = False,
    is_inference: bool = False,
    prepares_weights: bool = False,
    static_input_indices: Sequence[int] = (),
    settings: Settings | None = None,
    pass_manager: PassManager | None = None,
) -> Compiled:
    """Compile one functional ATen graph.

    Nodes of ``gm`` carry fake tensors in ``meta["val"]``, as after AOTAutograd or ``make_fx`` on fake tensors. The
    result takes one list of arguments, which it may empty, and returns a list or tuple. Where sizes of inputs are
    symbolic, the code serves all of them; a graph with something that needs fixed sizes (``stats()`` says what) is
    compiled at the first call with each combination instead. ``static_input_indices`` are inputs that somebody holds
    beyond each call, such as parameters. A graph that ``prepares_weights`` runs when these change. ``pass_manager``
    continues the numbering of an enclosing compilation, with its settings.
    """
    manager = pass_manager if pass_manager is not None else _new_manager(settings)
    kind = functional_kind(is_backward=is_backward, is_inference=is_inference, prepares_weights=prepares_weights)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position in static_input_indices:
        placeholders[position].meta[STATIC_INPUT] = True
    if not has_symbolic_inputs(gm):
        return _compile_functional_graph(gm, kind=kind, manager=manager)
    try:
        return _run_stages(gm, kind=kind, manager=manager)
    except CompileError as error:
        # Once per combination of sizes, everything can be compiled that has fixed sizes.
        manager.recorder.compiles_per_size(kind, error.reason())
        return SpecializedGraphs(gm, partial(_compile_for_sizes, kind=kind, manager=manager))


def compile_fx(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Compiled = compile_fx_inner,
    split: Partition | None = None,
    settings: Settings | None = None,
    prepares_weights: bool | None = None,
) -> Compiled:
    """Compile a captured graph of torch-level calls, for inference or training as its inputs ask for.

    The result takes the inputs of ``gm`` as positional arguments. Inputs may be lists, tuples and dictionaries of
    tensors. ``inner_compile`` compiles the functional graphs; it is called as :func:`compile_fx_inner` is. ``split``
    makes forward and backward of a joint graph in place of :func:`min_cut_rematerialization_partition` and is called as
    that is. With ``prepares_weights``, what depends on weights of inference alone is a graph of its own; where that is
    left open, it is so for our own ``inner_compile``. ``settings`` hold for the backward too, which is compiled when it
    first runs; without them, the context manager and the environment decide now.
    """
    settings = settings if settings is not None else config.resolve()
    reject_training(gm, example_inputs, settings)
    entry = None
    if inner_compile is compile_fx_inner and split is None:
        entry = function_entry(gm, example_inputs, settings, start(settings))
    tangents = partial(compile_tangents, gm, inner_compile=inner_compile, settings=settings)
    unfolded = partial(compile_unfolded, gm, settings=settings)
    if entry is not None and (found := entry.load(tangents, unfolded)) is not None:
        return found
    prepares = inner_compile is compile_fx_inner if prepares_weights is None else prepares_weights
    return compile_captured(
        gm, example_inputs, settings, entry, inner_compile=inner_compile, split=split, prepares_weights=prepares
    )


@with_room_for_frames
def compile_captured(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    entry: FunctionEntry | None,
    precompiling: Precompilation | None = None,
    *,
    inner_compile: Compiled = compile_fx_inner,
    split: Partition | None = None,
    prepares_weights: bool = True,
) -> Compiled:
    """:func:`compile_fx` without a look into the cache; the result goes to ``entry`` and to ``precompiling``."""
    manager = _new_manager(settings, keep_artifacts=entry is not None or precompiling is not None)
    if not manager.actions.take_compilation(f"a captured graph of {counted(operations(gm), 'operation')}"):
        gm.recompile()
        captured: Compiled = gm.forward
        return captured
    manager.recorder.tell("captured", CapturedGraph(gm, example_inputs))
    flat = flatten_inputs(gm, example_inputs) if has_nested_inputs(example_inputs) else FlatGraph(gm, example_inputs)
    capture_without_constant_floats(flat.graph_module)
    inner = partial(inner_compile, settings=settings, pass_manager=manager)
    try:
        with compile_session(), rng_state_kept():
            divide = split or min_cut_rematerialization_partition
            prepares = prepares_weights and settings.prepare_weights
            call = _run_captured_stages(flat, inner, divide, manager, entry, precompiling, prepares=prepares)
    except CompileError as error:
        return _run_eagerly(gm, "captured graph", error, settings, manager.recorder)
    except Exception as error:
        if breaks_the_graph(error):
            manager.recorder.broke(operations(gm), f"{type(error).__name__}: {first_line(error)}")
        raise
    if flat.consumed is not None:
        return with_nested_inputs(call.with_list, flat.consumed)
    tangents = partial(compile_tangents, gm, inner_compile=inner_compile, settings=settings)
    return finished_call(call, settings, manager.recorder, tangents)


def _run_captured_stages(
    flat: FlatGraph,
    inner: partial[Compiled],
    split: Partition,
    manager: PassManager,
    entry: FunctionEntry | None,
    precompiling: Precompilation | None,
    *,
    prepares: bool,
) -> CapturedCall:
    """The stages from a captured graph to functional ones, which ``inner`` compiles."""
    captured, structure = prepare_captured(flat, manager)
    has_parameters = any(True for _ in (*captured.parameters(), *captured.buffers()))
    completed = [taker.compiled for taker in (entry, precompiling) if taker is not None]
    builder = CallBuilder(flat, structure, manager.recorder, has_parameters=has_parameters, completed=completed)
    compilers = _GraphCompilers(
        builder,
        inner,
        split,
        manager,
        prepares=prepares,
        entries=(lambda: None) if entry is None else entry.unfolded,
        completed_unfolded=() if precompiling is None else (precompiling.compiled_unfolded,),
    )
    builder.call.wrapper = trace_captured(captured, flat.inputs, compilers)
    if entry is not None:
        entry.traced()
    if precompiling is not None and builder.obstacle:
        precompiling.cannot_be_saved(builder.obstacle)
    return builder.call


def prepare_captured(flat: FlatGraph, manager: PassManager) -> tuple[torch.fx.GraphModule, pytree.TreeSpec]:
    """A copy of a captured graph as AOTAutograd gets it, and the structure that the graph returned its results in."""
    captured = copy_graph_module(flat.graph_module)  # passes edit in place; the original stays whole for running it
    with stage("pre-grad passes"):
        rewrite_overlapping_writes(captured)
        reject_resizes_after_writes(captured)
        structure = flatten_outputs(captured)
        manager.run(PRE_GRAD, captured, kind="captured", inputs=flat.inputs)
    manager.recorder.record("captured graph", captured)
    return captured, structure


class GraphCompilers(Protocol):
    """What AOTAutograd calls with the graphs it traces of one captured graph."""

    def inference(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled: ...
    def partition(self, joint: torch.fx.GraphModule, inputs: Any, **facts: Any) -> Any: ...
    def forward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled: ...
    def backward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled: ...


def trace_captured(
    captured: torch.fx.GraphModule, inputs: Sequence[Any], compilers: GraphCompilers
) -> Callable[[list[Any]], Any]:
    """Call AOTAutograd, which calls ``compilers``; the result is its wrapper, as a function of one list of inputs."""
    with stage("AOTAutograd", ours=False):
        traced = trace_with_autograd(
            captured,
            inputs,
            forward_compiler=compilers.forward,
            # Called while Dynamo traces the caller of a backward that is inside a compiled function.
            backward_compiler=torch._dynamo.disable(compilers.backward),
            inference_compiler=compilers.inference,
            partition=compilers.partition,
            decompositions=decompositions(),
        )
    return takes_list(traced, captured)


class _GraphCompilers:
    """What AOTAutograd calls with the graphs it traces of one captured graph. The results go to ``builder``.

    An inference graph leaves layers as they are where ``unfolding`` asks for that. Without it, it has an unfolding of
    its own with ``entries`` and ``completed_unfolded``.
    """

    def __init__(
        self,
        builder: CallBuilder,
        inner: partial[Compiled],
        split: Partition,
        manager: PassManager,
        *,
        prepares: bool,
        unfolding: Unfolding | None = None,
        entries: Callable[[], UnfoldedEntries | None] = lambda: None,
        completed_unfolded: Sequence[CompletedUnfolded] = (),
    ) -> None:
        self._builder, self._inner, self._split, self._manager = builder, inner, split, manager
        self._prepares, self._unfolding = prepares, unfolding
        self._entries, self._completed_unfolded = entries, completed_unfolded
        self.compiled_inference: Compiled | None = None
        """The inference graph that was compiled, where there was one."""
        self._traced_results: tuple[TracedResult | None, ...] = ()

    def inference(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        self._builder.traced_inference(graph)
        static = static_input_indices()
        again, unfolding = None, self._unfolding
        if unfolding is None and self._prepares and (kept := keep_graph(graph)) is not None:
            again = UnfoldedCompilation(kept, static, self._inner, self._manager)
            unfolding = Unfolding(
                again,
                self._manager.recorder,
                self._manager.settings,
                entries=self._entries,
                completed=self._completed_unfolded,
            )
        weights = static if self._prepares else ()
        compiled = _compile_inference(graph, inputs, static, weights, self._inner, self._manager, unfolding)
        if isinstance(compiled, PreparedGraph):
            self._builder.compiled_inference(graph, compiled, compiled.taken)
        else:
            self._builder.compiled_inference(graph, compiled)
        if again is not None:
            again.function_of = self._builder.with_inference_graph()
        self.compiled_inference = compiled
        return compiled

    def partition(self, joint: torch.fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        self._builder.traced_training(joint, facts["num_fwd_outputs"])
        if self._manager.changed_by <= KEEP_SHARING:
            self._traced_results = traced_results(joint.graph, facts["num_fwd_outputs"])
        with stage("joint passes"):
            self._manager.run(JOINT, joint, kind="joint")
        self._manager.recorder.record("joint graph", joint)
        with stage("partition"):
            return self._split(
                joint, inputs, settings=self._manager.settings, target=self._manager.target, **facts
            )

    def forward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        keep_saved_tensors()
        ours = self._inner.func is compile_fx_inner
        if ours:
            keep_versions_of_outputs()
        compiled: Compiled = self._inner(graph, inputs, static_input_indices=static_input_indices())
        if ours:  # another compiler's results may be views, which the wrapper looks at
            self._builder.compiled_forward(graph, compiled)
        return compiled

    @with_room_for_frames
    def backward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        graph.graph.output_node().meta[TRACED_RESULTS] = self._traced_results
        compiled: Compiled = self._inner(graph, inputs, is_backward=True)
        self._builder.compiled_backward(compiled)
        return with_batched_gradients(compiled)


class UnfoldedCompilation:
    """Compiles an inference graph again, from the copy of it that was ``kept``, as an :class:`Unfolding` asks."""

    def __init__(
        self, kept: KeptGraph, static: Sequence[int], inner: partial[Compiled], manager: PassManager
    ) -> None:
        self.kept, self.static, self.inner, self.manager = kept, static, inner, manager
        self.function_of: Callable[[Compiled], CompiledFunction | None] = lambda _: None
        """Makes the whole function of what is compiled."""

    @with_room_for_frames
    def __call__(self, unfolding: Unfolding) -> Compiled:
        modes = torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast()  # as AOTAutograd compiles
        with compile_session(), rng_state_kept(), modes[0], modes[1], modes[2]:
            graph = self.kept()
            inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
            weights = self.static
            try:
                compiled = _compile_inference(graph, inputs, weights, weights, self.inner, self.manager, unfolding)
            except CompileError as error:
                return _run_functional_graph_eagerly(self.kept(), "inference", error, self.manager)
        function = self.function_of(compiled)
        if function is not None:
            unfolding.compiled(function)
        return compiled


@with_room_for_frames
def compile_unfolded(gm: torch.fx.GraphModule, unfolding: Unfolding, *, settings: Settings) -> Compiled | None:
    """Trace a captured graph whose function came from the cache, and compile its inference graph as ``unfolding`` asks.

    Called under the modes that it was captured in. The result takes the inputs of the graph in one list. None where the
    graph cannot be traced again: without the fake inputs that it was captured with, or where these have symbolic sizes.
    """
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    if any(type(value) is not FakeTensor or is_symbolic(value) for value in inputs):
        return None
    manager = _new_manager(settings, keep_artifacts=True, recorder=unfolding.recorder)
    inner = partial(compile_fx_inner, settings=settings, pass_manager=manager)
    try:
        with compile_session(), rng_state_kept():
            flat = FlatGraph(gm, inputs)
            captured, structure = prepare_captured(flat, manager)
            has_parameters = any(True for _ in (*captured.parameters(), *captured.buffers()))
            builder = CallBuilder(
                flat,
                structure,
                manager.recorder,
                has_parameters=has_parameters,
                completed=[lambda function, _: unfolding.compiled(function)],
            )
            divide = min_cut_rematerialization_partition
            compilers = _GraphCompilers(builder, inner, divide, manager, prepares=True, unfolding=unfolding)
            trace_captured(captured, inputs, compilers)
    except CompileError as error:
        _run_eagerly(gm, "captured graph", error, settings, manager.recorder)
        return None
    return compilers.compiled_inference


def _compile_inference(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    static: Sequence[int],
    weights: Sequence[int],
    inner: partial[Compiled],
    manager: PassManager,
    unfolding: Unfolding | None,
) -> Compiled:
    """An inference graph, and the graph of what depends on the inputs ``weights`` alone where there is such.

    There is no ``unfolding`` of graphs that cannot be kept for later, as those with symbolic sizes.
    """
    unfolded = frozenset[int]() if unfolding is None else unfolding.unfolded
    hoisted = hoist_weights(graph, weights, manager, unfolded)
    compiled: Compiled = inner(graph, inputs, is_inference=True, static_input_indices=static)
    if hoisted is None:
        return compiled
    manager.recorder.record("hoisted weights", hoisted)
    of_weights = inner(hoisted.weights, [inputs[k] for k in hoisted.taken], prepares_weights=True)
    return PreparedGraph(of_weights, compiled, hoisted.taken, unfolding if has_checks(hoisted.weights.graph) else None)


def hoist_weights(
    graph: torch.fx.GraphModule, weights: Sequence[int], manager: PassManager, unfolded: frozenset[int] = frozenset()
) -> Hoisted | None:
    """The joint passes of an inference graph, and what of it depends on the inputs ``weights`` alone, taken out.

    Nothing is folded into what is made of the inputs ``unfolded``.
    """
    prepares = manager.settings.prepare_weights and len(weights) > 0
    if prepares:
        mark_weights(graph.graph, weights, unfolded)
    with stage("joint passes"):
        manager.run(JOINT, graph, kind="inference")
    with stage("hoisting"):
        return hoist(graph) if prepares else None


def _new_manager(
    settings: Settings | None, *, keep_artifacts: bool = False, recorder: Recorder | None = None
) -> PassManager:
    settings = settings if settings is not None else config.resolve()
    reject_unknown_passes(settings)
    return PassManager(settings, start(settings), keep_artifacts=keep_artifacts, recorder=recorder)


def compile_tangents(
    gm: torch.fx.GraphModule,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    inner_compile: Compiled = compile_fx_inner,
    settings: Settings,
) -> Compiled:
    """``gm`` on dual numbers, as a function of values and tangents."""
    flat = copy_graph_module(gm)
    restore_structure = results_in(flatten_outputs(flat))
    try:
        with compile_session(), rng_state_kept(), stage("forward-mode tracing", ours=False):
            traced = trace_tangents(flat, primals, tangents)
    except CompileError as error:
        eager = _run_eagerly(gm, "captured graph on dual numbers", error, settings, Recorder())
        duals = [
            isinstance(value, torch.Tensor) and tangent is not None
            for value, tangent in zip(primals, tangents, strict=True)
        ]
        return lambda values, given: eager(*as_dual_numbers([*values, *(t for t in given if t is not None)], duals))
    arguments = [*primals, *(tangent for tangent in tangents if tangent is not None)]
    run = compile_fx(traced.graph_module, arguments, inner_compile=inner_compile, settings=settings)

    def with_tangents(values: Sequence[Any], given: Sequence[Any]) -> Any:
        results = run(*values, *(tangent for tangent in given if tangent is not None))
        return restore_structure(as_dual_numbers(results, traced.with_tangent))

    return with_tangents


def _compile_for_sizes(
    gm: torch.fx.GraphModule, arguments: Sequence[Any], *, kind: str, manager: PassManager
) -> Compiled:
    """Compile a graph with symbolic sizes for the sizes of ``arguments``."""
    try:
        with compile_session(), rng_state_kept(), outside_tracing(), stage("specialize"):
            concrete = specialize(gm, arguments)
    except CompileError as error:
        return _run_functional_graph_eagerly(gm, kind, error, manager)
    return _compile_functional_graph(concrete, kind=kind, manager=manager)


def _compile_functional_graph(
    gm: torch.fx.GraphModule, *, kind: str, manager: PassManager
) -> Compiled:
    """Native code; ``gm`` itself where a stage fails and settings allow for that."""
    try:
        return _run_stages(gm, kind=kind, manager=manager)
    except CompileError as error:
        return _run_functional_graph_eagerly(gm, kind, error, manager)


def _run_stages(gm: torch.fx.GraphModule, *, kind: str, manager: PassManager) -> Compiled:
    """The stages from a functional graph to native code; ``gm`` itself stays as it is."""
    settings = manager.settings
    manager.recorder.tell("functional graph", FunctionalGraph(kind, gm))
    with compile_session():
        with outside_tracing():  # constants of the graph are read for its key and stored with it
            artifact = _cached_artifact(gm, kind=kind, manager=manager)
        with stage("load"), outside_tracing():
            executable = load(
                artifact,
                compilation=manager.recorder.id,
                keep_artifact=manager.keep_artifacts,
                cuda_graphs=manager.recorder if settings.cuda_graphs and kind != "weights" else None,
            )
        release_library_pages()
    manager.recorder.tell("loaded", executable)
    assert artifact.summary is not None
    account_for(artifact.summary, manager.recorder, keep_memory=settings.keep_memory)
    return executable


def _cached_artifact(gm: torch.fx.GraphModule, *, kind: str, manager: PassManager) -> Artifact:
    """What the cache has of a functional graph, or what the stages make of it."""
    with stage("cache key"):
        entry = graph_entry(gm, kind, manager)
    if entry is None:
        return compile_graph(gm, kind=kind, manager=manager)
    with entry.compiling() as found:
        if found is not None:
            return found
        artifact = compile_graph(gm, kind=kind, manager=manager)
        entry.store(artifact)
        return artifact


def compile_graph(gm: torch.fx.GraphModule, *, kind: str, manager: PassManager) -> Artifact:
    """The stages from a functional graph to an artifact, which is not loaded; ``gm`` itself stays as it is."""
    settings, record = manager.settings, manager.recorder.record
    optimized = copy_graph_module(gm)
    with compile_session(), rng_state_kept(), outside_tracing():
        with stage("post-grad passes"):
            manager.run(POST_GRAD, optimized, kind=kind)
        record(f"{kind} graph", optimized)
        manager.recorder.multiplied(matmul_records(optimized.graph, kind))
        with stage("lowering"):
            program = lower(optimized, settings, manager.target, kind=kind, actions=manager.actions)
            if settings.checks:
                verify_program(program)
        record("program", program)
        advise_tf32(program, manager.target)
        with stage("schedule"):
            plan = schedule(program, settings, manager.target, manager.actions)
            if settings.checks:
                verify_plan(plan)
        record("plan", plan)
        with stage("codegen"):
            generated = generate(plan, settings, manager.target)
            artifact = replace(generated.artifact, summary=_summary(plan, gm, kind))
        record("code", replace(generated, artifact=artifact))
    return artifact


def _summary(plan: Plan, gm: torch.fx.GraphModule, kind: str) -> GraphSummary:
    steps = all_steps(plan)
    externs = (step for step in steps if isinstance(step, ExternCall) and not is_native(step))
    return GraphSummary(
        kind,
        nodes=len(gm.graph.nodes),
        operations=operations(gm),
        kernels=len({step.kernel for step in steps if isinstance(step, Launch)}),
        launches=sum(isinstance(step, Launch) for step in steps),
        extern_calls=tuple(Counter(str(step.target) for step in externs).items()),
        allocated_bytes=plan.peak_bytes - plan.arena_bytes,
    )


def _run_eagerly(
    gm: torch.fx.GraphModule, kind: str, error: CompileError, settings: Settings, recorder: Recorder
) -> Compiled:
    """``gm`` itself, after one warning; or the error, when the settings do not allow for that."""
    # The innermost graph that fails has the command already.
    command = None if hasattr(error, "__notes__") else reproduction_command(gm, error, settings)
    if not settings.fallback:
        if command is not None:
            error.add_note(f"Reproduce it with: {command}")
        raise error
    recorder.fell_back(kind, error.reason(), operations=operations(gm))
    warn_user(
        f"torchkiln could not compile the {kind} and runs it eagerly: {error.reason()}."
        " Set fallback=False to get this as an error."
        + (f" Reproduce it with: {command}" if command is not None else ""),
        FallbackWarning,
    )
    gm.recompile()
    forward: Compiled = gm.forward
    return forward


def _run_functional_graph_eagerly(
    gm: torch.fx.GraphModule, kind: str, error: CompileError, manager: PassManager
) -> Compiled:
    eager = _run_eagerly(gm, f"{kind} graph", error, manager.settings, manager.recorder)
    return with_one_list(with_native_results(eager, kind))


@contextmanager
def stage(name: str, *, ours: bool = True) -> Iterator[None]:
    """Time a stage, and turn what fails in it into a CompileError that names it, but for what Dynamo waits for."""
    with timed_stage(name), no_collections() if ours else nullcontext():
        try:
            yield
        except (CompileError, OptionError):
            raise  # named already, or the user's to correct
        except NodeFailure as failure:
            cause = failure.__cause__ or failure
            raise CompileError(name, cause, node=failure.node, source=failure.source) from cause
        except PassFailure as failure:
            cause = failure.__cause__ or failure
            raise CompileError(name, cause, graph_pass=failure.name) from cause
        except Exception as error:
            if not ours and is_for_dynamo(error):
                raise
            raise CompileError(name, error) from error


@contextmanager
def rng_state_kept() -> Iterator[None]:
    """Whatever compiling draws, the user's random numbers go on as if it had not."""
    with _disable_current_modes():
        state = torch.get_rng_state()
    try:
        yield
    finally:
        with _disable_current_modes():
            torch.set_rng_state(state)
