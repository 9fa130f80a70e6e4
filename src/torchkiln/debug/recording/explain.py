"""``torchkiln.explain``: compile and run a function, and say all that happened on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchkiln import config
from torchkiln.debug.recording.collector import Collector
from torchkiln.debug.recording.dynamo import DynamoNotes, noting
from torchkiln.debug.recording.limits import measure_limits, raised_limits
from torchkiln.debug.recording.model import Recording
from torchkiln.memory.capture import calling
from torchkiln.memory.unchanged import copied_inputs, modules_of, state_kept
from torchkiln.recorder import observe

_ROUNDS, _SECONDS = 5, 0.2


def explain(
    function: Callable[..., Any], /, *args: Any, dynamic: bool | None = None, **kwargs: Any
) -> Recording:
    """Compile ``function``, call it with copies of the arguments, and record everything.

    Where results require gradients, backward runs too, from their sum. Kernels and calls are timed while they run, and
    so is eager. Print the result, ``save`` it to a folder, or write it as a page with ``html``. The function's modules,
    its arguments and the random numbers are afterwards as before. The cache is not used. ``dynamic`` is that of
    ``torch.compile``: with True sizes are symbolic, with None those that ``torch._dynamo.mark_dynamic`` was called for.
    """
    function = getattr(function, "_orig_mod", function)  # what torch.compile was given
    collector = Collector()
    with noting() as notes, observe(collector):
        # Dynamo keeps code by code object: a new one counts against no limit of the user's function.
        compiled = torch.compile(calling(function), backend="kiln", dynamic=dynamic)
        with config.settings(profile=True, adaptive=False):
            for _ in range(2):  # calls after the first are direct
                _call(function, compiled, args, kwargs)
            compiled_seconds = _seconds(function, compiled, args, kwargs)
    eager_seconds = _seconds(function, function, args, kwargs)
    recording = with_dynamo(collector.recording(name_of(function)), notes)
    limits = raised_limits(measure_limits(), recording)
    if not recording.compilations:  # both times are eager's
        return replace(recording, limits=limits)
    return replace(recording, eager_seconds=eager_seconds, compiled_seconds=compiled_seconds, limits=limits)


def name_of(function: Callable[..., Any]) -> str:
    """What a person would call a function or a module."""
    own = getattr(function, "__qualname__", None)
    return str(own) if own is not None else type(function).__qualname__


def with_dynamo(recording: Recording, notes: DynamoNotes) -> Recording:
    """A recording with what Dynamo reported."""
    return replace(
        recording,
        graph_breaks=notes.graph_breaks(),
        guards=notes.guards(),
        recompilations=notes.recompilations(),
    )


def _call(function: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """One call with copies of the arguments, and its backward; the seconds of both."""
    with state_kept(function), _gradients_kept(function):
        given, named = copied_inputs((tuple(args), dict(kwargs)))
        start = time.perf_counter()
        ends = [
            leaf.sum() if leaf.dim() else leaf
            for leaf in tree_leaves(call(*given, **named))
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        return time.perf_counter() - start


@contextmanager
def _gradients_kept(function: Any) -> Iterator[None]:
    """The gradients of the function's parameters are those of before the block."""
    parameters = [p for module in modules_of(function) for p in module.parameters()]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _seconds(function: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """The best of some calls."""
    best, rounds, begin = float("inf"), 0, time.perf_counter()
    while rounds < _ROUNDS or time.perf_counter() - begin < _SECONDS:
        best = min(best, _call(function, call, args, kwargs))
        rounds += 1
    return best
