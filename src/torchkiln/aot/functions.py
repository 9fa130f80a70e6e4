"""A program compiled for one target, as plain data: its graphs go through all stages, and none is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchkiln.aot.program import Program
from torchkiln.aot.size_ranges import for_all_sizes, lowered_for, shape_env_of
from torchkiln.artifact import Artifact, CallingConvention, CompiledFunction
from torchkiln.compiler import compile_graph, hoist_weights, prepare_captured, rng_state_kept, stage, trace_captured
from torchkiln.config import Settings
from torchkiln.errors import CompileError, NotPreparedError, PackageError, noting_refusals
from torchkiln.frontend.aot import forward_metadata, keep_saved_tensors, keep_versions_of_outputs
from torchkiln.frontend.compile_session import compile_session
from torchkiln.frontend.conventions import (
    ALIASED_RESULTS,
    OTHER_RESULTS,
    Captured,
    JointFacts,
    inference_convention,
    joint_facts,
    training_convention,
)
from torchkiln.frontend.flat_inputs import FlatGraph
from torchkiln.graph.aliases import STATIC_INPUT, TRACED_RESULTS, TracedResult, traced_results
from torchkiln.graph.foldable import CHECKS
from torchkiln.graph.manager import PassManager
from torchkiln.partition import min_cut_rematerialization_partition
from torchkiln.passes.joint import JOINT
from torchkiln.passes.pre_grad import KEEP_SHARING
from torchkiln.target import Target

Compiled = Callable[..., Any]

_log = logging.getLogger(__name__)

# Without gradients, native code returns views of what results share, and numbers as they are.
_SERVED = frozenset({ALIASED_RESULTS, OTHER_RESULTS})


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A compiled function, and for each of its inputs whether it computes the gradient."""

    function: CompiledFunction
    trained: tuple[bool, ...]


def compile_program(program: Program, settings: Settings, target: Target, *, train: bool) -> CompiledProgram:
    """All stages; :class:`PackageError` for a program that only runs in the process that compiles it.

    Weights that cannot be prepared are left as they are: a package has no captured graph to run in its place.
    """
    unfolded: frozenset[int] = frozenset()
    while True:
        try:
            compilers = _trace(program, settings, target, unfolded, train=train)
            break
        except NotPreparedError as error:
            known = list(program.weights)
            names = ", ".join(known[position] for position in sorted(error.weights))
            if error.weights:
                _log.warning("the package computes with %s as it is: %s", names, error.what)
                unfolded |= error.weights
            else:
                _log.warning("the package computes with its weights as they are: %s", error.what)
                settings = replace(settings, prepare_weights=False)
    if train and compilers.trained != compilers.asked:
        # Traced again with the others detached: results must require no gradient on their behalf.
        inputs = [
            value if trained or not isinstance(value, torch.Tensor) else value.detach()
            for value, trained in zip(program.inputs, compilers.trained, strict=True)
        ]
        compilers = _trace(replace(program, inputs=tuple(inputs)), settings, target, unfolded, train=train)
    return CompiledProgram(compilers.function(train=train), compilers.trained)


def _trace(
    program: Program, settings: Settings, target: Target, unfolded: frozenset[int], *, train: bool
) -> _ArtifactCompilers:
    manager = PassManager(settings, target)
    options = {"force_non_lazy_backward_lowering": True, "unlift_effect_tokens": True}
    try:
        with compile_session(), rng_state_kept(), torch.set_grad_enabled(train), functorch_config.patch(options):
            captured, structure = prepare_captured(FlatGraph(program.graph, program.inputs), manager)
            compilers = _ArtifactCompilers(program, structure, manager, unfolded)
            with for_all_sizes(program.graph, program.inputs):
                trace_captured(captured, program.inputs, compilers)
    except CompileError as error:
        if isinstance(error.cause, (PackageError, NotPreparedError)):
            raise error.cause from error
        raise PackageError(
            f"The model cannot be compiled ahead of time: {error.reason()}. Change that part of it, or compile the"
            " model where it runs, with torch.compile."
        ) from error
    return compilers


class _ArtifactCompilers:
    """What AOTAutograd calls with the graphs it traces of one program; keeps their artifacts."""

    def __init__(
        self, program: Program, structure: pytree.TreeSpec, manager: PassManager, unfolded: frozenset[int]
    ) -> None:
        self._manager, self._weights, self._unfolded = manager, len(program.weights), unfolded
        self._values = tuple(program.weights.values())
        self._ranges, self._shape_env = program.ranges, shape_env_of(program.inputs)
        self.asked = tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in program.inputs)
        self._captured = Captured(
            len(program.inputs), structure, None, has_parameters=False, autocast=False, inlines_hooks=False
        )
        self._joint: JointFacts | None = None
        self._traced_results: tuple[TracedResult | None, ...] = ()
        self._convention: CallingConvention | None = None
        self._artifacts: dict[str, Artifact] = {}

    def inference(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        hoisted = hoist_weights(graph, range(self._weights), self._manager, self._unfolded)
        self._mark_weights(graph)
        found = inference_convention(self._captured, forward_metadata(), graph, served=_SERVED)
        if hoisted is not None:
            _check_foldable(hoisted.weights, [self._values[position] for position in hoisted.taken])
            self._compile(hoisted.weights, "weights")
            found = replace(found, weights=hoisted.taken)
        self._convention = found
        return self._compile(graph, "inference")

    def partition(self, joint: torch.fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        _reject_onednn_lstm(joint)
        self._joint = joint_facts(joint, facts["num_fwd_outputs"])
        if self._manager.changed_by <= KEEP_SHARING:
            self._traced_results = traced_results(joint.graph, facts["num_fwd_outputs"])
        with stage("joint passes"):
            self._manager.run(JOINT, joint, kind="joint")
        with stage("partition"):
            settings, target = self._manager.settings, self._manager.target
            return min_cut_rematerialization_partition(joint, inputs, settings=settings, target=target, **facts)

    def forward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        keep_saved_tensors()
        keep_versions_of_outputs()
        assert self._joint is not None
        self._mark_weights(graph)
        self._convention = training_convention(self._captured, forward_metadata(), graph, self._joint)
        return self._compile(graph, "forward")

    def backward(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        graph.graph.output_node().meta[TRACED_RESULTS] = self._traced_results
        return self._compile(graph, "backward")

    @property
    def trained(self) -> tuple[bool, ...]:
        """For each input whether its gradient is computed."""
        computed = self._joint.has_gradient if self._joint is not None else ()
        return tuple(asked and there for asked, there in zip_longest(self.asked, computed, fillvalue=False))

    def function(self, *, train: bool) -> CompiledFunction:
        """What was compiled, once AOTAutograd is done."""
        convention = self._convention
        if train and "backward" not in self._artifacts:
            raise PackageError(
                "Nothing in the model requires a gradient, so that there is nothing to train; compile it without"
                " train=True, or with parameters or inputs that require gradients."
            )
        if convention is None or convention.wrapped:
            needs = convention.wrapped if convention is not None else "a graph that AOTAutograd did not compile"
            raise PackageError(
                f"The model cannot be compiled ahead of time: it needs AOTAutograd's wrapper ({needs}). Compile it"
                " where it runs, with torch.compile."
            )
        if train:
            return CompiledFunction(convention, self._artifacts["forward"], self._artifacts["backward"])
        return CompiledFunction(convention, self._artifacts["inference"], weights=self._artifacts.get("weights"))

    def _compile(self, graph: torch.fx.GraphModule, kind: str) -> Compiled:
        with lowered_for(self._ranges, self._shape_env):
            self._artifacts[kind] = compile_graph(graph, kind=kind, manager=self._manager)
        if self._artifacts[kind].entry.is_for_this_process:
            raise PackageError(
                "The model calls a Triton kernel, which a package cannot hold. Compile the model where it runs, with"
                " torch.compile."
            )

        def never_called(arguments: list[Any]) -> Any:
            raise PackageError("A graph that was compiled for a package is called before the package is loaded.")

        never_called._boxed_call = True  # type: ignore[attr-defined]
        return never_called

    def _mark_weights(self, graph: torch.fx.GraphModule) -> None:
        """Packages hold their weights from call to call."""
        for placeholder in graph.graph.find_nodes(op="placeholder")[: self._weights]:
            placeholder.meta[STATIC_INPUT] = True


def _check_foldable(weights: torch.fx.GraphModule, values: Sequence[torch.Tensor]) -> None:
    """Raise NotPreparedError where ``weights`` would for these values, by the nodes alone that this depends on.

    The error names the inputs of all layers that are refused.
    """
    asked = [node for node in weights.graph.nodes if node.target in CHECKS]
    needed = set(asked)
    for node in reversed(weights.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    computed: dict[torch.fx.Node, Any] = dict(zip(weights.graph.find_nodes(op="placeholder"), values, strict=True))
    with _disable_current_modes(), torch.no_grad(), noting_refusals() as refusals:
        for node in weights.graph.nodes:
            if node in needed and node.op == "get_attr":
                computed[node] = attrgetter(node.target)(weights)
            elif node in needed and node.op == "call_function":
                arguments, named = torch.fx.map_arg((node.args, node.kwargs), computed.__getitem__)
                computed[node] = node.target(*arguments, **named)
    error = refusals.error()
    if error is not None:
        raise error


def _reject_onednn_lstm(joint: torch.fx.GraphModule) -> None:
    """Run without gradients, as compiled code runs it, the operator gives no workspace, which its backward takes."""
    if joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer.default):
        raise PackageError(
            "The model cannot be trained ahead of time with the LSTM of oneDNN; compile it inside `with"
            " torch.backends.mkldnn.flags(enabled=False):`."
        )

