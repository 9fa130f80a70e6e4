"""Calls of an inference graph that was divided: what depends on weights alone runs when a weight has changed.

Every call compares the weights with those of the last preparation: the tensor object, its memory, its version counter,
and a few of its elements. The last tells of writes that torch does not count, such as an optimizer's through ``.data``;
one that changes single elements in that way is not seen (:func:`torchkiln.prepare_again` is for those).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.errors import NotPlainError, NotPreparedError
from torchkiln.native.weight_marks import WeightMarks, mark_weights
from torchkiln.runtime.executable import CompiledGraph
from torchkiln.runtime.tracing import not_traced

Function = Callable[..., Any]

# Those that exist, for users to say that they wrote to weights behind torch's back.
_prepared: weakref.WeakSet[PreparedGraph] = weakref.WeakSet()


def prepare_again() -> None:
    """Have every compiled function prepare its weights anew at its next call.

    Needed after writes that neither torch nor a look at a few elements tells of: to single elements of a weight,
    through ``weight.data`` or memory shared with NumPy.
    """
    for graph in list(_prepared):
        graph.forget()


@dataclass(frozen=True, eq=False)
class _State:
    """What was prepared, and how to tell that it still holds. Keeps the weights' memory, so that no other tensor can
    come to lie at its address."""

    values: tuple[torch.Tensor, ...]
    marks: WeightMarks


class PreparedGraph:
    """Call with one list of inputs, of which ``taken`` are weights; answers the list of outputs.

    ``weights`` takes these and returns what ``rest`` takes after the inputs. Safe to call from many threads.
    """

    def __init__(self, weights: Function, rest: Function, taken: Sequence[int]) -> None:
        self._boxed_call = True
        self.weights, self.rest, self._taken = weights, rest, tuple(taken)
        self._run = rest.function if isinstance(rest, CompiledGraph) else rest
        self._state: _State | None = None
        _prepared.add(self)

    def forget(self) -> None:
        self._state = None

    @not_traced
    def __call__(self, inputs: list[Any]) -> Any:
        state = self._state
        if state is None or not state.marks.hold(inputs):
            state = self._prepare(inputs)
        given = len(inputs)
        inputs.extend(state.values)
        try:
            return self._run(inputs)
        except NotPlainError:
            del inputs[given:]  # the caller may run the graph as captured
            raise

    def _prepare(self, inputs: Sequence[Any]) -> _State:
        weights = [inputs[position] for position in self._taken]
        # Marked first: what another thread writes meanwhile is then seen by the next call.
        marks = mark_weights(weights, self._taken)
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            try:
                values = tuple(self.weights(list(weights)))
            except NotPreparedError as error:
                error.compilation = getattr(self.rest, "compilation", None)
                raise
        state = _State(values, marks)
        self._state = state
        return state
