"""A captured graph as its caller calls it: straight to its compiled graphs, or through AOTAutograd's wrapper.

Results are the same. The calling convention says which of the two a graph takes, and why. Some calls take the wrapper
although the graph could do without it:

- Training, until the backward is compiled, which AOTAutograd does with the forward where backward needs sizes, and else
  when it first runs. Compiled autograd finds a backward that is not compiled yet in the wrapper alone.
- The first call of a graph with operators of users: AOTAutograd looks there at what these return.
- Training inside a transform of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from torchkiln.artifact.convention import CallingConvention
from torchkiln.errors import NotPlainError
from torchkiln.frontend.conventions import Captured, JointFacts, inference_convention, joint_facts, training_convention
from torchkiln.frontend.flat_inputs import FlatGraph
from torchkiln.graph.effects import is_torchs_own, runs_twice
from torchkiln.recorder import Recorder
from torchkiln.runtime.direct_calls import inference_call, results_in, training_call
from torchkiln.runtime.executable import CompiledGraph

Function = Callable[..., Any]


class CapturedCall:
    """A captured graph as a function of its inputs, or of one list of them (:meth:`with_list`).

    The compiled graphs are handed over as AOTAutograd makes them, then its ``wrapper``, a function of one list.
    With tensors that native code cannot read, the graph runs as captured. ``structure`` is what it returns its results
    in. Made where the graph was captured, with the autocast of that place.
    """

    def __init__(
        self, graph: FlatGraph, structure: pytree.TreeSpec, recorder: Recorder, *, has_parameters: bool
    ) -> None:
        self.wrapper: Function | None = None
        self.trains = False
        self.can_run_twice = False
        self._graph, self._recorder = graph.graph_module, recorder
        # AOTAutograd has autocast off where it compiles.
        autocast = torch._C._is_any_autocast_enabled()
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        inlines_hooks = hooks is not None and all(isinstance(hook, torch.fx.GraphModule) for hook in hooks)
        self._captured = Captured(
            len(graph.inputs), structure, graph.consumed, has_parameters, autocast, inlines_hooks
        )
        self._in_structure = results_in(structure)
        self._joint: JointFacts | None = None
        self._forward: tuple[CallingConvention, Function] | None = None
        self._direct: Function | None = None
        self._checks_operators = False  # whether AOTAutograd has yet to see what operators of users return
        self._direct_after_check: Function | None = None

    def traced_inference(self, graph: torch.fx.GraphModule) -> None:
        """Takes the functional graph before any pass."""
        self.can_run_twice = runs_twice(graph)

    def traced_training(self, joint: torch.fx.GraphModule, forward_results: int) -> None:
        """Takes the joint graph before any pass; those of nested regions come before the one around them."""
        self.can_run_twice, self.trains = runs_twice(joint), True
        self._joint = joint_facts(joint, forward_results)

    def compiled_inference(self, graph: torch.fx.GraphModule, compiled: Function) -> None:
        """Called while AOTAutograd compiles the inference graph."""
        convention = inference_convention(self._captured, _metadata(), graph)
        self._recorder.record("calling convention", convention)
        self._checks_operators = _calls_operators_of_users(graph)
        if not convention.wrapped and isinstance(compiled, CompiledGraph):
            self._call_directly(inference_call(convention, compiled.function))

    def compiled_forward(self, graph: torch.fx.GraphModule, compiled: Function) -> None:
        """Called while AOTAutograd compiles the forward graph."""
        assert self._joint is not None
        convention = training_convention(self._captured, _metadata(), graph, self._joint)
        self._recorder.record("calling convention", convention)
        self._checks_operators = _calls_operators_of_users(graph)
        if not convention.wrapped and _takes_list(compiled):
            self._forward = convention, compiled

    def compiled_backward(self, compiled: Function) -> None:
        """Called while AOTAutograd compiles the backward graph: at once where it needs sizes, or when it first runs."""
        if self._forward is not None and _takes_list(compiled):
            convention, forward = self._forward
            self._call_directly(training_call(convention, forward, compiled))

    @property
    def is_complete(self) -> bool:
        """Whether calls are as they will be: in training, once the backward is compiled and calls are direct."""
        return self._direct is not None or not self.trains

    def __call__(self, *inputs: Any) -> Any:
        try:
            results = self._run([*inputs])
        except NotPlainError as error:
            if error.compilation != self._recorder.id:
                raise  # of a graph that an operator of this one calls, when part of this one has run
            return self.as_captured(*inputs)  # only operators of torch can compute with these
        return self._in_structure(results)

    def with_list(self, inputs: list[Any]) -> Any:
        """Call with one list of inputs, which the call may empty: those that only it holds are freed early."""
        given = len(inputs)
        try:
            results = self._run(inputs)
        except NotPlainError as error:
            if error.compilation != self._recorder.id or len(inputs) != given:
                raise  # on AOTAutograd's path the list is emptied first
            return self.as_captured(*inputs)
        return self._in_structure(results)

    def wrapped(self, *inputs: Any) -> Any:
        """Call through AOTAutograd's wrapper."""
        assert self.wrapper is not None
        return self._in_structure(self.wrapper([*inputs]))

    @cached_property
    def as_captured(self) -> Function:
        """The graph itself, run by torch."""
        self._graph.recompile()
        forward: Function = self._graph.forward
        return forward

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        direct = self._direct
        if direct is not None and not (self.trains and torch._C._are_functorch_transforms_active()):
            results: Sequence[Any] = direct(inputs)
            return results
        assert self.wrapper is not None
        results = self.wrapper(inputs)
        self._checks_operators = False
        after_check = self._direct_after_check
        if after_check is not None:
            self._direct = after_check
        return results

    def _call_directly(self, call: Function) -> None:
        if self._checks_operators:
            self._direct_after_check = call
        else:
            self._direct = call


def _calls_operators_of_users(graph: torch.fx.GraphModule) -> bool:
    targets = (node.target for node in graph.graph.nodes)
    return any(isinstance(target, torch._ops.OpOverload) and not is_torchs_own(target) for target in targets)


def _metadata() -> Any:
    """What AOTAutograd knows of the captured graph, while it compiles a functional one of it."""
    context = TracingContext.try_get()
    assert context is not None
    return context.fw_metadata


def _takes_list(compiled: Function) -> bool:
    return bool(getattr(compiled, "_boxed_call", False))
