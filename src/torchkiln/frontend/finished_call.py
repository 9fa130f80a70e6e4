"""What ``torch.compile`` gets: the call of a captured graph, with what surrounds it in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._guards import TracingContext

from torchkiln.config import Settings
from torchkiln.frontend.adaptive import AdaptiveCall
from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.frontend.dual_numbers import CarriesTangents
from torchkiln.recorder import Recorder

Function = Callable[..., Any]


def finished_call(
    call: CapturedCall, settings: Settings, recorder: Recorder, compile_tangents: Callable[..., Function]
) -> Function:
    """``call``, timed against eager where settings ask for that, and with forward-mode differentiation.

    ``compile_tangents`` is given the values and tangents of inputs that are dual numbers.
    """
    run: Function = call
    if settings.adaptive and settings.fallback and call.can_run_twice:
        run = AdaptiveCall(call, recorder)
    run = CarriesTangents(run, compile_tangents)
    # Fake tensors tell the wrappers above nothing.
    return _after_fake_call(call.with_fake_tensors, run) if first_call_is_fake() else run


def first_call_is_fake() -> bool:
    """While compiling: whether Dynamo calls the result once with fake tensors, to learn the strides of its outputs.

    It does for each graph that it cuts a DDP module into, one for each bucket of gradients.
    """
    return bool(getattr(TracingContext.try_get(), "fakify_first_call", False))


def _after_fake_call(fake: Function, real: Function) -> Function:
    """``real``, but for the first call, which goes to ``fake``."""
    pending = True

    def call(*arguments: Any) -> Any:
        nonlocal pending
        if pending:
            pending = False
            return fake(*arguments)
        return real(*arguments)

    return call
