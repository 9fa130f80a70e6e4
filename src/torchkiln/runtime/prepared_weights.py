"""Calls of an inference graph that was divided: what depends on weights alone runs when a weight has changed.

Every call compares the weights with those of the last preparation: the tensor object, its memory, its version counter,
and a few of its elements. The last tells of writes that torch does not count, such as an optimizer's through ``.data``;
one that changes a part of a weight in that way may not be seen (:func:`torchkiln.prepare_again` is for those).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchkiln.errors import DiscardedError, NotPlainError, NotPreparedError, noting_refusals
from torchkiln.runtime.executable import CompiledGraph
from torchkiln.runtime.freed_memory import freed_memory
from torchkiln.runtime.plain_tensors import is_plain
from torchkiln.runtime.tracing import not_traced
from torchkiln.runtime.weight_marks import WeightMarks

Function = Callable[..., Any]

_log = logging.getLogger(__name__)

# Calls in a row, each with other weights, after which the log says so.
_NOTICED = 8

# Those that exist, for users to say that they wrote to weights behind torch's back.
_prepared: weakref.WeakSet[PreparedGraph] = weakref.WeakSet()


def prepare_again() -> None:
    """Have every compiled function prepare its weights anew at its next call.

    Needed after writes that neither torch nor a look at a few elements tells of: to a part of a weight, such as a row,
    through ``weight.data`` or memory shared with NumPy.
    """
    for graph in list(_prepared):
        graph.forget()


def prepared_graphs() -> frozenset[PreparedGraph]:
    """Those that exist now."""
    return frozenset(_prepared)


class _Marks(Protocol):
    """What tells that weights are those that were prepared."""

    @property
    def hold(self) -> Callable[[Sequence[Any]], bool]: ...


@dataclass(frozen=True, eq=False)
class _State:
    """What was prepared of ``weights``, and how to tell that it still holds.

    Keeps the weights' memory, so that no other tensor can come to lie at its address. Where some are ``discarded``,
    nothing can be prepared again.
    """

    values: tuple[torch.Tensor, ...]
    weights: tuple[Any, ...]
    marks: _Marks
    discarded: bool = False


@dataclass(frozen=True, eq=False)
class _MarksWithDiscarded:
    """Marks of the weights that were kept, and the tensors that stand for the others."""

    kept: WeightMarks | None
    standing: tuple[tuple[int, torch.Tensor], ...]

    def hold(self, inputs: Sequence[Any]) -> bool:
        if self.kept is not None and not self.kept.hold(inputs):
            return False
        return all(inputs[position] is tensor for position, tensor in self.standing)


@dataclass(frozen=True, eq=False)
class _Refusal:
    """Weights that cannot be prepared, and why: no call tries again while they stay.

    ``instead`` runs such calls, where there is such a function.
    """

    marks: _Marks
    what: str
    instead: Function | None = None


CompileUnfolded = Callable[[frozenset[int]], Function | None]
"""Compiles a graph with nothing folded into weights that are made of these inputs; the result takes the same list.

None where that cannot be done: such calls are refused.
"""


class PreparedGraph:
    """Call with one list of inputs, of which ``taken`` are weights; answers the list of outputs.

    ``weights`` takes these and returns what ``rest`` takes after the inputs. Weights of layers that are refused are
    left as they are by ``compile_unfolded``; without it the call is refused. Safe to call from many threads.
    """

    def __init__(
        self,
        weights: Function,
        rest: Function,
        taken: Sequence[int],
        compile_unfolded: CompileUnfolded | None = None,
    ) -> None:
        self._boxed_call = True
        self._compile_unfolded = compile_unfolded
        self._unfolded: dict[frozenset[int], Function | None] = {}
        self._compiling = threading.Lock()
        self.weights, self.rest, self.taken = weights, rest, tuple(taken)
        self._run = rest.function if isinstance(rest, CompiledGraph) else rest
        self._state: _State | None = None
        self._refusal: _Refusal | None = None
        self._in_a_row = 0
        _prepared.add(self)

    def forget(self) -> None:
        if self._state is not None and not self._state.discarded:  # what was discarded cannot have changed
            self._state = None
        self._refusal = None

    @property
    def is_prepared(self) -> bool:
        """Whether a call has prepared weights since the last :meth:`forget`."""
        return self._state is not None

    @property
    def refusal(self) -> str | None:
        """Why weights of the last call cannot be prepared; None where all are."""
        return None if self._refusal is None else self._refusal.what

    def only_prepared(self) -> tuple[torch.Tensor, ...]:
        """The weights of the last preparation that calls do not read themselves."""
        state, rest = self._state, self.rest
        if state is None or not isinstance(rest, CompiledGraph):
            return ()
        unread = frozenset(rest.info.positions("unused"))
        return tuple(w for w, position in zip(state.weights, self.taken, strict=True) if position in unread)

    def discard(self, standing: Mapping[int, torch.Tensor]) -> None:
        """Hold what was prepared without weights: calls get ``standing`` in their place, by the weight's ``id``."""
        state = self._state
        assert state is not None
        pairs = list(zip(self.taken, state.weights, strict=True))
        placed = tuple((position, standing[id(weight)]) for position, weight in pairs if id(weight) in standing)
        kept = [(position, weight) for position, weight in pairs if id(weight) not in standing]
        marks = WeightMarks([weight for _, weight in kept], [position for position, _ in kept]) if kept else None
        weights = tuple(standing.get(id(weight), weight) for weight in state.weights)
        self._state = _State(state.values, weights, _MarksWithDiscarded(marks, placed), discarded=True)

    @not_traced
    def __call__(self, inputs: list[Any]) -> Any:
        state = self._state
        if state is None or not state.marks.hold(inputs):
            prepared = self._prepare(inputs)
            if isinstance(prepared, _Refusal):
                if prepared.instead is None:
                    raise self._not_prepared(prepared.what)
                return prepared.instead(inputs)
            state = prepared
        else:
            self._in_a_row = 0
        given = len(inputs)
        inputs.extend(state.values)
        try:
            return self._run(inputs)
        except NotPlainError:
            if state.discarded:
                raise DiscardedError("This call needs the model in eager mode") from None
            del inputs[given:]  # the caller may run the graph as captured
            raise

    def prepare(self, inputs: Sequence[Any]) -> None:
        """What a call with these inputs does first; NotPreparedError where the call would be refused."""
        state = self._state
        if state is None or not state.marks.hold(inputs):
            prepared = self._prepare(inputs, is_call=False)
            if isinstance(prepared, _Refusal) and prepared.instead is None:
                raise self._not_prepared(prepared.what)

    def _prepare(self, inputs: Sequence[Any], *, is_call: bool = True) -> _State | _Refusal:
        weights = [inputs[position] for position in self.taken]
        if self._state is not None and self._state.discarded:
            raise DiscardedError("A weight of a frozen model has changed")
        if any(map(_lacks_memory, weights)):
            raise DiscardedError("A frozen model is compiled for further sizes")
        refusal = self._refusal
        if refusal is not None and refusal.marks.hold(inputs):
            return refusal
        # Marked first: what another thread writes meanwhile is then seen by the next call.
        marks = WeightMarks(weights, self.taken)
        # What weights that change often leave behind is taken for the next ones.
        apart = freed_memory().blocks_apart(sum(w.nbytes for w in weights)) if self._state is None else nullcontext()
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False), torch.no_grad(), noting_refusals() as refusals, apart:
            try:
                values = tuple(self.weights(list(weights)))
                error = refusals.error()
            except NotPreparedError as raised:
                error = raised
        if error is not None:
            made = self._refused(marks, error, warn=is_call and refusal is None)
            self._refusal = made
            return made
        self._refusal = None
        state = _State(values, tuple(weights), marks)
        self._state = state
        self._in_a_row += 1
        if self._in_a_row == _NOTICED:
            inference = any(weight.is_inference() for weight in weights)
            reason = "were made in inference mode, which counts no writes" if inference else "change between calls"
            _log.warning("weights are prepared at each call, as they %s; prepare_weights=False avoids that", reason)
        return state

    def _refused(self, marks: _Marks, error: NotPreparedError, *, warn: bool) -> _Refusal:
        if self._compile_unfolded is None or not error.weights:
            return self._as_captured(marks, error, warn=warn)
        with self._compiling:
            if error.weights not in self._unfolded:
                _log.info("a layer's weight stays as it is: %s", error.what)
                self._unfolded[error.weights] = self._compile_unfolded(error.weights)
            instead = self._unfolded[error.weights]
        if instead is None:
            return self._as_captured(marks, error, warn=warn)
        return _Refusal(marks, error.what, instead)

    def _as_captured(self, marks: _Marks, error: NotPreparedError, *, warn: bool) -> _Refusal:
        if warn:
            _log.warning("a graph runs as captured: %s", error)
        return _Refusal(marks, error.what)

    def _not_prepared(self, what: str) -> NotPreparedError:
        error = NotPreparedError(what)
        error.compilation = getattr(self.rest, "compilation", None)
        return error


def _lacks_memory(weight: object) -> bool:
    """Whether ``weight`` stands for one that was discarded."""
    if not isinstance(weight, torch.Tensor) or not is_plain(weight):
        return False
    return weight.numel() > 0 and weight.untyped_storage().nbytes() == 0
