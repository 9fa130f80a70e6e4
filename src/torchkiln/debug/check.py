"""One call of a program, compiled and judged: raises where results are worse than eager's."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx
from torch._dynamo.exc import BackendCompilerFailed

from torchkiln import config
from torchkiln.compiler import compile_fx
from torchkiln.debug.accuracy import Divergence, first_divergence
from torchkiln.debug.determinism import self_difference
from torchkiln.debug.runs import expected_of, interpreted, results_of, seconds_of
from torchkiln.errors import KilnError
from torchkiln.graph.modes import in_modes
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.memory.capture import calling
from torchkiln.memory.unchanged import copied_inputs, state_kept


class DivergenceError(KilnError):
    """A compiled graph whose results diverge from eager's."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(str(divergence))


class NondeterministicError(KilnError):
    """A captured graph that gives other results when eager runs it again, so that nothing can be judged by them."""


class SlowError(KilnError):
    """A compiled graph that takes longer than it may, relative to eager."""


def check(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: bool | None = False,
    slower: float | None = None,
    settings: Mapping[str, object] | None = None,
    modes: Mapping[str, str] | None = None,
) -> None:
    """Compile ``function`` with ``backend="kiln"``, call it on copies of the arguments and judge every captured graph.

    Raises :class:`DivergenceError` for outputs or gradients that are worse than eager's, :class:`SlowError` for a graph
    that takes more than ``slower`` times as long as eager, :class:`NondeterministicError` where eager differs from
    itself, and what compiling raises. Random numbers are eager's. ``settings`` go over those in force, and so do
    ``modes`` (``autocast``, ``default_dtype``).
    """
    chosen = replace(
        config.resolve(settings), fallback=False, adaptive=False, cache=False, rng="eager", reproductions=os.devnull
    )

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = copy_graph_module(gm)
        compiled = compile_fx(gm, example_inputs, settings=chosen)

        def call(*inputs: Any) -> Any:
            judge(captured, compiled, inputs)
            if slower is not None:
                _time(captured, compiled, inputs, slower)
            return captured(*inputs)

        return call

    model = getattr(function, "_orig_mod", function)
    with state_kept(model), in_modes(**(modes or {})):
        given, named = copied_inputs((tuple(args), dict(kwargs or {})))
        try:
            torch.compile(calling(model), backend=backend, dynamic=dynamic)(*given, **named)
        except BackendCompilerFailed as failure:
            raise failure.inner_exception from None


def judge(captured: torch.fx.GraphModule, compiled: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Raise :class:`DivergenceError` where ``compiled`` is worse than ``captured`` run eagerly.

    Raises :class:`NondeterministicError` where eager differs from itself; ``compiled`` is called then too, as it may
    crash.
    """
    gradients = torch.is_grad_enabled()
    expected = expected_of(interpreted(captured), inputs, gradients=gradients)
    difference = self_difference(captured, inputs, expected, gradients=gradients)
    if difference is not None:
        results_of(compiled, inputs, gradients=gradients)
        raise NondeterministicError(difference)
    for _ in range(2):  # the second call goes past AOTAutograd's wrapper
        found = first_divergence(results_of(compiled, inputs, gradients=gradients), expected)
        if found is not None:
            raise DivergenceError(found)


def _time(captured: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Any], slower: float) -> None:
    eager, ours = [], []
    for _ in range(5):
        eager.append(seconds_of(captured, inputs, gradients=torch.is_grad_enabled()))
        ours.append(seconds_of(compiled, inputs, gradients=torch.is_grad_enabled()))
    ratio = statistics.median(ours) / max(statistics.median(eager), 1e-9)
    if ratio > slower:
        raise SlowError(f"{ratio:.1f} times as long as eager, at most {slower:g} times is allowed")
