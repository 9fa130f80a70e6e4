"""A captured graph as its caller calls it: straight to its compiled graphs, or through AOTAutograd's wrapper.

Results are the same. The calling convention says which of the two a graph takes, and why. Some calls take the wrapper
although the graph could do without it:

- Training, until the backward is compiled, which AOTAutograd does with the forward where backward needs sizes, and else
  when it first runs. Compiled autograd finds a backward that is not compiled yet in the wrapper alone.
- The first call of a graph with operators of users: AOTAutograd looks there at what these return.
- Training inside a transform of torch.func.

A function from the cache has no wrapper. It is complete, and inside a transform it runs as captured. A precompiled
function has no captured graph either, and refuses what native code cannot read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from torchkiln.artifact import CompiledFunction
from torchkiln.errors import NotPlainError
from torchkiln.recorder import Recorder
from torchkiln.runtime.direct_calls import results_in

Function = Callable[..., Any]


class CapturedCall:
    """A captured graph as a function of its inputs, or of one list of them (:meth:`with_list`).

    ``wrapper`` is AOTAutograd's, ``direct`` what calls the compiled graphs without it; both take one list and return
    flat results, which ``structure`` puts together. At least one is set before the first call. With tensors that native
    code cannot read, the graph runs as captured, where ``graph_module`` is not None.
    """

    def __init__(
        self,
        graph_module: torch.fx.GraphModule | None,
        structure: pytree.TreeSpec,
        recorder: Recorder,
        *,
        direct: Function | None = None,
        trains: bool = False,
        can_run_twice: bool = False,
    ) -> None:
        self.wrapper: Function | None = None
        self.direct = direct
        self.direct_after_wrapper: Function | None = None
        """What becomes ``direct`` once the wrapper has been called."""
        self.trains = trains
        self.can_run_twice = can_run_twice
        self._graph, self._recorder = graph_module, recorder
        self.in_structure = results_in(structure)

    @property
    def is_complete(self) -> bool:
        """Whether calls are as they will be: in training, once the backward is compiled and calls are direct."""
        return self.direct is not None or not self.trains

    def __call__(self, *inputs: Any) -> Any:
        try:
            results = self._run([*inputs])
        except NotPlainError as error:
            return self.refused(error, inputs)
        return self.in_structure(results)

    def refused(self, error: NotPlainError, inputs: Sequence[Any]) -> Any:
        """The results of a call that raised ``error`` before anything had run."""
        if error.compilation != self._recorder.id or self._graph is None:
            raise error  # of a graph that an operator of this one calls, when part of this one has run
        return self.as_captured(*inputs)  # only operators of torch can compute with these

    def with_list(self, inputs: list[Any]) -> Any:
        """Call with one list of inputs, which the call may empty: those that only it holds are freed early."""
        given = len(inputs)
        try:
            results = self._run(inputs)
        except NotPlainError as error:
            if error.compilation != self._recorder.id or len(inputs) != given or self._graph is None:
                raise  # on AOTAutograd's path the list is emptied first
            return self.as_captured(*inputs)
        return self.in_structure(results)

    def with_fake_tensors(self, *inputs: Any) -> Any:
        """Call with fake tensors: through AOTAutograd's wrapper, which knows the results, where there is one."""
        return self.as_captured(*inputs) if self.wrapper is None else self.in_structure(self.wrapper([*inputs]))

    @cached_property
    def as_captured(self) -> Function:
        """The graph itself, run by torch."""
        assert self._graph is not None
        self._graph.recompile()
        forward: Function = self._graph.forward
        return forward

    def _run(self, inputs: list[Any]) -> Sequence[Any]:
        direct = self.direct
        if direct is not None and not (self.trains and torch._C._are_functorch_transforms_active()):
            results: Sequence[Any] = direct(inputs)
            return results
        if self.wrapper is None:
            raise NotPlainError("tensors of a transform of torch.func", self._recorder.id)
        results = self.wrapper(inputs)
        after_wrapper = self.direct_after_wrapper
        if after_wrapper is not None:
            self.direct = after_wrapper
        return results


Completed = Callable[[CompiledFunction, CapturedCall], None]
"""Called with a function that needs nothing but its artifacts, and its call."""
