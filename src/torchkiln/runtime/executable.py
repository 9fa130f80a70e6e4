"""A compiled graph as Python calls it: object code, loaded, with the Python objects it needs."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from torchkiln.artifact import Artifact
from torchkiln.artifact.artifact import CARD_SYMBOL, ENTRY_SYMBOL, RUN_SYMBOL, TEXTS_SYMBOL, TIMES_SYMBOL, EntryInfo
from torchkiln.artifact.calls import Body, Call, OperatorCall, fill
from torchkiln.errors import UnsupportedError
from torchkiln.native.loader import LoadedObject, load_object
from torchkiln.native.tensor_layout import check_layout
from torchkiln.recorder import Recorder
from torchkiln.runtime.builtin_functions import METH_FASTCALL, PyMethodDef, defined_by
from torchkiln.runtime.card import CardArray
from torchkiln.runtime.cuda_graphs.replays import Replays
from torchkiln.runtime.higher_order import run_bodies
from torchkiln.runtime.ownership import is_held_alone
from torchkiln.runtime.plain_tensors import describe, is_plain, make_plain, plain_copy
from torchkiln.runtime.support import resolve
from torchkiln.runtime.tensor_handles import delete_handles, handles_of, steal
from torchkiln.runtime.timing import StepTimes
from torchkiln.runtime.tracing import not_traced


class CompiledGraph:
    """Call with one list of inputs; answers the list of outputs.

    Tensors that only the list holds may be taken out of it (None takes their place) and freed after their last use.
    Loads the code of ``artifact`` into this process.
    ``direct`` says whether inputs are read in place (None: where the layout check allows it); otherwise tensors
    go through torch's handle functions, which costs a few microseconds a call. Safe to call from many threads.
    ``times`` are those of its steps, where it was compiled with the setting ``profile``. ``compilation`` is the number
    that a NotPlainError of it names. With ``keep_artifact`` it can be asked for what it was loaded from. Where it has a
    card, calls are replayed from ``cuda_graphs``, if that is not None: it is told of those that are not.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        direct: bool | None = None,
        compilation: int | None = None,
        keep_artifact: bool = False,
        cuda_graphs: Recorder | None = None,
    ) -> None:
        info = artifact.entry
        self._artifact = artifact if keep_artifact else None
        self._boxed_call = True  # on the instance: torch's wrappers take over the attributes of what they wrap
        constants = [c if k in info.opaque_constants else _readable(c) for k, c in enumerate(artifact.constants)]
        arrays: dict[str, Any] = {}
        if info.card is not None:
            self._card = CardArray(info.card, artifact.card_code, artifact.card_object, constants)
            arrays[CARD_SYMBOL] = self._card.array
            constants = self._card.constants
        self.info = info
        self.compilation = compilation
        self.direct = check_layout().usable if direct is None else direct
        timed = (TIMES_SYMBOL,) if info.timed_steps else ()
        kernels = load_object(artifact.kernel_code, info.kernels, resolve) if artifact.kernel_code else None
        texts = [text.text(artifact.sources) for text in artifact.texts]
        loaded = load_object(
            artifact.step_code,
            (ENTRY_SYMBOL, RUN_SYMBOL, *timed),
            resolve,
            calls=kernels,
            arrays={TEXTS_SYMBOL: _c_strings(texts), **arrays},
        )
        if info.card is not None:
            loaded.keeps = self._card
        self.times = StepTimes(loaded, info.timed_steps) if timed else None
        body = cache(_load_body)  # several calls may share one
        callbacks = [
            _native_callback(
                _operator_function(call) if isinstance(call, OperatorCall) else run_bodies(call, body),
                call,
                texts[call.where],
            )
            for call in info.python_calls
        ]
        plain = partial(
            make_plain,
            tensors=info.positions("tensor"),
            written=info.written,
            numbers=info.positions("number"),
            compilation=compilation,
        )
        objects = (*constants, *callbacks, *info.values, torch._C.TensorBase, plain)
        self._call: Callable[..., list[Any]]
        if self.direct:
            self._call = _native_function(loaded, objects)
        else:
            self._call = _HandleCaller(loaded, info, constants, objects, plain)
        reuses = info.reused and self.direct
        self._run: Callable[[list[Any]], list[Any]] = _with_reuse(self._call, info.reused) if reuses else self._call
        if cuda_graphs is not None and info.card is not None and artifact.summary is not None:
            kept = _without_reuse(self._call) if reuses else self._call
            self._run = Replays(
                info, self._card, kept, self._run, kind=artifact.summary.kind, recorder=cuda_graphs
            )

    def take_artifact(self) -> Artifact | None:
        """What it was loaded from, where it keeps that; asked for once, it is kept no longer."""
        artifact, self._artifact = self._artifact, None
        return artifact

    @property
    def function(self) -> Callable[[list[Any]], list[Any]]:
        """What a call comes to: the native function itself where there is nothing to do around it."""
        around = self.info.reused or self.info.python_calls or self.times is not None  # times live as long as this does
        return self if around or isinstance(self._run, Replays) or not self.direct else self._call

    @not_traced
    def __call__(self, inputs: list[Any]) -> list[Any]:
        return self._run(inputs)


def _with_reuse(call: Callable[..., list[Any]], reused: Sequence[int]) -> Callable[[list[Any]], list[Any]]:
    """``call``, told which of the inputs ``reused`` nobody else holds."""

    def run(inputs: list[Any]) -> list[Any]:
        return call(inputs, sum(is_held_alone(inputs, position) << k for k, position in enumerate(reused)))

    return run


def _without_reuse(call: Callable[..., list[Any]]) -> Callable[[list[Any]], list[Any]]:
    """``call``, told that its caller holds all inputs."""
    return lambda inputs: call(inputs, 0)


def _native_function(loaded: LoadedObject, objects: tuple[object, ...]) -> Callable[[list[Any]], list[Any]]:
    """A builtin function over ``kiln_entry``. Its tuple keeps the code alive for as long as the function is."""
    definition = PyMethodDef(ENTRY_SYMBOL.encode(), loaded[ENTRY_SYMBOL], METH_FASTCALL, None)
    return defined_by(definition, (*objects, definition, loaded))


class _HandleCaller:
    """Calls ``kiln_run`` with handles made and taken back by torch's own functions."""

    def __init__(
        self,
        loaded: LoadedObject,
        info: EntryInfo,
        constants: Sequence[torch.Tensor],
        objects: tuple[object, ...],
        make_plain: Callable[[list[Any]], None],
    ) -> None:
        self._loaded = loaded
        self._info = info
        self._objects = objects
        self._make_plain = make_plain
        self._constants = handles_of(list(constants))
        self._constant_array = _array(self._constants)
        weakref.finalize(self, delete_handles, self._constants)
        # Holds the interpreter, unlike other ctypes calls: the function lets go of it itself, and raises.
        prototype = ctypes.PYFUNCTYPE(
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.py_object,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
        )
        self._run = prototype(loaded[RUN_SYMBOL])

    def __call__(self, inputs: list[Any]) -> list[Any]:
        info = self._info
        if len(inputs) != len(info.inputs):
            raise TypeError(f"this graph takes a list of {len(info.inputs)} inputs, got {len(inputs)}")
        for k, (value, kind) in enumerate(zip(inputs, info.inputs, strict=True)):
            if kind in ("tensor", "opaque") and not isinstance(value, torch.Tensor):
                raise TypeError(f"input {k} is not a tensor")
        self._make_plain(inputs)
        owned = handles_of([v for v, kind in zip(inputs, info.inputs, strict=True) if kind in ("tensor", "opaque")])
        try:
            given = iter(owned)
            handles = _array(
                [
                    next(given)
                    if kind in ("tensor", "opaque")
                    else operator.index(value) % 2**64
                    if kind == "number"
                    else 0
                    for value, kind in zip(inputs, info.inputs, strict=True)
                ]
            )
            outs = _array([0] * (info.tensor_outputs + info.number_outputs))
            none_given_away = _array([0] * len(info.inputs))
            self._run(handles, self._constant_array, self._objects, outs, none_given_away, 0)
            tensors = steal(list(outs)[: info.tensor_outputs])
        finally:
            delete_handles(owned)
        numbers = (ctypes.c_int64 * len(outs)).from_buffer(outs)[info.tensor_outputs :]
        booleans = [number != 0 for number in numbers]
        sources = {"tensor": tensors, "input": inputs, "value": info.values, "number": numbers, "boolean": booleans}
        return [sources[source.kind][source.number] for source in info.outputs]


def _c_strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    """An array of NUL-terminated strings, which live as long as it does."""
    # A path that is no UTF-8 has surrogates in it.
    return (ctypes.c_char_p * len(texts))(*(text.encode(errors="backslashreplace") for text in texts))


def _array(values: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(values), 1))(*values)


def _native_callback(
    function: Callable[[list[torch.Tensor], list[int]], Any], call: Call, where: str
) -> Callable[[list[Any]], list[Any]]:
    """What native code calls for something it cannot call itself: capsules of owned handles in and out, and after those
    going in the numbers known at run time. ``where`` says in words what runs."""

    def callback(given: list[Any]) -> list[Any]:
        numbers = [item for item in given if isinstance(item, int)]
        tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(given[: len(given) - len(numbers)])
        try:
            answer = function(tensors, numbers)
        except Exception as error:
            error.add_note(f"(in {where})")
            raise
        found = _tensors_of(answer)[: call.results]
        found += [None] * (call.results - len(found))
        returned = iter(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([t for t in found if t is not None]))
        return [None if tensor is None else next(returned) for tensor in found]

    return callback


# Operators of torchkiln and the modules that register them. A process that did not compile the code may not have them
# yet; few graphs call one through Python.
_OWN = {
    **dict.fromkeys(("kiln::check", "kiln::scan", "kiln::sort"), "torchkiln.graph.native_operators"),
    **dict.fromkeys(("kiln::random", "kiln::randint"), "torchkiln.graph.seeded"),
    "kiln::triton_kernel": "torchkiln.graph.triton_kernels",
    "kiln::require_zero": "torchkiln.graph.quantized_operators",
    **dict.fromkeys(("kiln::scaled_weight", "kiln::require_finite"), "torchkiln.graph.foldable"),
}


def _operator_function(call: OperatorCall) -> Callable[[list[torch.Tensor], list[int]], Any]:
    """An operator as a function of the tensors, and the numbers known at run time, among its arguments."""
    if call.operator in _OWN:
        import_module(_OWN[call.operator])
    target = call.target
    positional = [a for a in target._schema.arguments if not a.kwarg_only]
    names = [a.name for a in target._schema.arguments if a.kwarg_only]

    def function(tensors: list[torch.Tensor], numbers: list[int]) -> Any:
        values = [fill(argument, tensors, numbers) for argument in call.arguments]
        keywords = dict(zip(names, values[len(positional) :], strict=True))
        return target(*values[: len(positional)], **keywords)

    return function


def _load_body(body: Body) -> CompiledGraph:
    return CompiledGraph(body.artifact)


def _tensors_of(answer: Any) -> list[torch.Tensor | None]:
    """An operator's results in order: tensors, numbers in tensors, and None for undefined ones and anything else."""
    if isinstance(answer, (tuple, list)):
        return [tensor for item in answer for tensor in _tensors_of(item)]
    if isinstance(answer, (bool, int, float)):
        return [torch.tensor(answer, dtype=torch.float64 if isinstance(answer, float) else None)]
    return [answer if isinstance(answer, torch.Tensor) else None]


def _readable(constant: torch.Tensor) -> torch.Tensor:
    plain = constant if is_plain(constant) else plain_copy(constant)
    if plain is None:
        raise UnsupportedError(f"a constant that is {describe(constant)}, which native code cannot read")
    return plain


def load(
    artifact: Artifact,
    *,
    compilation: int | None = None,
    keep_artifact: bool = False,
    cuda_graphs: Recorder | None = None,
) -> CompiledGraph:
    """A compiled graph, ready to call in this process, as a graph of ``compilation``."""
    return CompiledGraph(artifact, compilation=compilation, keep_artifact=keep_artifact, cuda_graphs=cuda_graphs)
