"""From the graphs that AOTAutograd makes of a captured graph to its call, and to what a cache keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from torchkiln.artifact import Artifact
from torchkiln.artifact.convention import CallingConvention, CompiledFunction
from torchkiln.frontend.aot import forward_metadata
from torchkiln.frontend.captured_call import CapturedCall, Completed
from torchkiln.frontend.conventions import Captured, JointFacts, inference_convention, joint_facts, training_convention
from torchkiln.frontend.flat_inputs import FlatGraph
from torchkiln.graph.effects import is_of_users, runs_twice
from torchkiln.recorder import Recorder
from torchkiln.runtime.direct_calls import inference_call, training_call
from torchkiln.runtime.executable import CompiledGraph
from torchkiln.runtime.prepared_weights import PreparedGraph

Function = Callable[..., Any]

_NOT_COMPILED = "one of its graphs runs eagerly, or is compiled for each combination of sizes"


class CallBuilder:
    """Takes the compiled graphs as AOTAutograd makes them, and completes ``call``.

    Made where the graph was captured, with the autocast of that place. Each of ``completed`` is called once with the
    compiled function, where calls go straight to native code: at once for inference, in training when the backward is
    compiled. Where they never will be, ``obstacle`` says why.
    """

    def __init__(
        self,
        graph: FlatGraph,
        structure: pytree.TreeSpec,
        recorder: Recorder,
        *,
        has_parameters: bool,
        completed: Sequence[Completed] = (),
    ) -> None:
        self.call = CapturedCall(graph.graph_module, structure, recorder)
        self._recorder, self._completed = recorder, completed
        # AOTAutograd has autocast off where it compiles.
        autocast = torch._C._is_any_autocast_enabled()
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        inlines_hooks = hooks is not None and all(isinstance(hook, torch.fx.GraphModule) for hook in hooks)
        self._captured = Captured(
            len(graph.inputs), structure, graph.consumed, has_parameters, autocast, inlines_hooks
        )
        self._joint: JointFacts | None = None
        self._inference: CallingConvention | None = None
        self._forward: tuple[CallingConvention, Function] | None = None
        self._wrapper_first = False
        self.obstacle = ""

    def traced_inference(self, graph: torch.fx.GraphModule) -> None:
        """Takes the functional graph before any pass."""
        self.call.can_run_twice = runs_twice(graph)

    def traced_training(self, joint: torch.fx.GraphModule, forward_results: int) -> None:
        """Takes the joint graph before any pass; those of nested regions come before the one around them."""
        self.call.can_run_twice, self.call.trains = runs_twice(joint), True
        self._joint = joint_facts(joint, forward_results)

    def compiled_inference(
        self, graph: torch.fx.GraphModule, compiled: Function, weights: Sequence[int] = ()
    ) -> None:
        """Called while AOTAutograd compiles the inference graph; ``weights`` as in :class:`CallingConvention`."""
        found = inference_convention(self._captured, forward_metadata(), graph)
        convention = self._noted(replace(found, weights=tuple(weights)), graph)
        self._inference = convention
        if convention.wrapped:
            self._not_complete(convention, compiled)
        elif isinstance(compiled, PreparedGraph):
            self._call_directly(inference_call(convention, compiled))
            self._complete(convention, forward=compiled.rest, weights=compiled.weights)
        elif isinstance(compiled, CompiledGraph):
            self._call_directly(inference_call(convention, compiled.function))
            self._complete(convention, forward=compiled)
        else:
            self._not_complete(convention, compiled)

    def with_inference_graph(self) -> Callable[[Function], CompiledFunction | None]:
        """What makes the whole function of an inference graph that was compiled again; None where it cannot be kept.

        The result does not hold the call, which holds it.
        """
        convention = self._inference
        is_kept = convention is not None and not convention.wrapped and not self._wrapper_first

        def function_of(compiled: Function) -> CompiledFunction | None:
            graphs = {"forward": compiled}
            weights: tuple[int, ...] = ()
            if isinstance(compiled, PreparedGraph):
                graphs, weights = {"forward": compiled.rest, "weights": compiled.weights}, compiled.taken
            artifacts = _artifacts(graphs)
            if not is_kept or convention is None or len(artifacts) < len(graphs):
                return None
            return CompiledFunction(replace(convention, weights=weights), **artifacts)

        return function_of

    def compiled_forward(self, graph: torch.fx.GraphModule, compiled: Function) -> None:
        """Called while AOTAutograd compiles the forward graph."""
        assert self._joint is not None
        convention = self._noted(training_convention(self._captured, forward_metadata(), graph, self._joint), graph)
        if not convention.wrapped and _takes_list(compiled):
            self._forward = convention, compiled
        else:
            self._not_complete(convention, compiled)

    def compiled_backward(self, compiled: Function) -> None:
        """Called while AOTAutograd compiles the backward graph: at once where it needs sizes, or when it first runs."""
        if self._forward is not None and _takes_list(compiled):
            convention, forward = self._forward
            self._call_directly(training_call(convention, forward, compiled))
            self._complete(convention, forward=forward, backward=compiled)

    def _noted(self, convention: CallingConvention, graph: torch.fx.GraphModule) -> CallingConvention:
        self._recorder.record("calling convention", convention)
        # AOTAutograd looks at what operators of users return in the first call.
        self._wrapper_first = _calls_operators_of_users(graph)
        if self._wrapper_first:
            self.obstacle = "it calls operators of users"
        return convention

    def _not_complete(self, convention: CallingConvention, compiled: Function) -> None:
        parts = (compiled.weights, compiled.rest) if isinstance(compiled, PreparedGraph) else (compiled,)
        for part in parts:
            if isinstance(part, CompiledGraph):
                part.take_artifact()
        wrapped = convention.wrapped
        self.obstacle = f"it needs AOTAutograd's wrapper ({wrapped})" if wrapped else _NOT_COMPILED

    def _call_directly(self, call: Function) -> None:
        if self._wrapper_first:
            self.call.direct_after_wrapper = call
        else:
            self.call.direct = call

    def _complete(self, convention: CallingConvention, **graphs: Function) -> None:
        found = _artifacts(graphs)
        if len(found) < len(graphs):
            self.obstacle = self.obstacle or _NOT_COMPILED
        elif not self._wrapper_first:
            for completed in self._completed:
                completed(CompiledFunction(convention, **found), self.call)


def _artifacts(graphs: Mapping[str, Function]) -> dict[str, Artifact]:
    """Those of the graphs that were kept for whoever stores them."""
    taken = {name: graph.take_artifact() for name, graph in graphs.items() if isinstance(graph, CompiledGraph)}
    return {name: artifact for name, artifact in taken.items() if artifact is not None}


def _calls_operators_of_users(graph: torch.fx.GraphModule) -> bool:
    targets = (node.target for node in graph.graph.nodes)
    return any(isinstance(target, torch._ops.OpOverload) and is_of_users(target) for target in targets)



def _takes_list(compiled: Function) -> bool:
    return bool(getattr(compiled, "_boxed_call", False))
