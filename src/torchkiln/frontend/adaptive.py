"""Never slower than eager: a graph is timed compiled and as captured, once; the faster one runs from then on.

An inference graph is timed in its first call, so that all results come from one of them. A training graph is timed in
the first call after its backward was compiled. Only what can be run twice without a trace is timed: no random numbers,
no writes to inputs, no operators but torch's own, none that eager may not survive; and only where nobody watches.
Compiled code that is a little slower is kept (``MARGIN``), since times differ from call to call.

A graph called under hooks for saved tensors stays compiled: they would see those of every timed call. Activation
checkpointing is made of such hooks, and must find the same tensors saved when it runs a region again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.frontend.captured_call import CapturedCall
from torchkiln.native.tensor_classes import is_no_subclass
from torchkiln.recorder import Recorder
from torchkiln.runtime.plain_tensors import is_plain

Function = Callable[..., Any]

MARGIN = 1.05
# Rounds of both; the second number only where the first says that eager is faster.
ROUNDS = (2, 3)
# Short graphs are called several times a round, for about so long.
SHORTEST_ROUND, MOST_CALLS = 200e-6, 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Times:
    """Seconds of one call, the best of a few."""

    compiled: float
    eager: float

    @property
    def eager_is_faster(self) -> bool:
        return self.compiled > MARGIN * self.eager


class AdaptiveCall:
    """Runs ``compiled``, or the graph as captured once that was measured to be faster.

    Graphs that train are timed with their backward. ``recorder`` is that of the compilation.
    """

    def __init__(self, compiled: CapturedCall, recorder: Recorder) -> None:
        self._recorder = recorder
        self._compiled = compiled
        self._chosen: Function | None = None
        self._lock = threading.Lock()

    @property
    def stays_compiled(self) -> bool:
        """Whether it was decided that all later calls run compiled."""
        return self._chosen is self._compiled

    def __call__(self, *inputs: Any) -> Any:
        chosen = self._chosen
        if chosen is None:
            chosen = self._choose(inputs)
        return chosen(*inputs)

    def _choose(self, inputs: Sequence[Any]) -> Function:
        if not self._lock.acquire(blocking=False):
            return self._compiled  # another thread is measuring
        try:
            if self._chosen is None and _hooks_for_saved_tensors():
                self._chosen = self._compiled
            if self._chosen is None and self._compiled.is_complete and not _is_watched():
                self._chosen = self._measured(inputs)
            return self._chosen or self._compiled
        finally:
            self._lock.release()

    def _measured(self, inputs: Sequence[Any]) -> Function:
        if not all(_is_plain(value) for value in inputs) or torch._C._are_functorch_transforms_active():
            return self._compiled
        on_card = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
        if on_card and torch.cuda.is_current_stream_capturing():
            return self._compiled  # nothing may be waited for
        eager = self._compiled.as_captured
        step = _training_step if self._compiled.trains else _inference_step
        try:
            waits = (torch.cuda.synchronize,) if on_card else ()
            times = compare(lambda: step(self._compiled, inputs), lambda: step(eager, inputs), *waits)
        except Exception:  # the caller sees what its own call raises, if that does
            return self._compiled
        kind = "training" if self._compiled.trains else "inference"
        reason = f"compiled {times.compiled * 1e3:.3f} ms, eager {times.eager * 1e3:.3f} ms"
        if not times.eager_is_faster:
            _log.info("a graph for %s stays compiled: %s", kind, reason)
            return self._compiled
        self._recorder.is_slower(kind, reason)
        _log.warning(
            "a graph for %s runs eagerly, which is faster: %s (adaptive=False keeps it compiled)", kind, reason
        )
        return eager


def _no_wait() -> None:
    """The CPU is done when a call returns."""


def compare(
    compiled: Callable[[], object], eager: Callable[[], object], wait: Callable[[], object] = _no_wait
) -> Times:
    """Time both, in turns, after one call of each; ``wait`` waits for what calls began."""
    compiled()
    eager()
    once = _seconds(compiled, 1, wait)
    calls = max(1, min(MOST_CALLS, int(SHORTEST_ROUND / max(once, 1e-7))))
    best = Times(float("inf"), float("inf"))
    for rounds in ROUNDS:
        for _ in range(rounds):
            best = Times(
                min(best.compiled, _seconds(compiled, calls, wait)), min(best.eager, _seconds(eager, calls, wait))
            )
        if not best.eager_is_faster:
            break
    return best


def _seconds(run: Callable[[], object], calls: int, wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_no_subclass(value) and is_plain(value)
    return isinstance(value, (int, float, bool))


def _hooks_for_saved_tensors() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _is_watched() -> bool:
    """Whether somebody would see the calls that are timed: a profiler, a dispatch mode, or a check of gradients."""
    return (
        torch.autograd.profiler._is_profiler_enabled
        or torch.is_anomaly_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _inference_step(run: Function, inputs: Sequence[Any]) -> None:
    run(*inputs)


def _training_step(run: Function, inputs: Sequence[Any]) -> None:
    """Forward and backward on leaves of their own, which share the memory of ``inputs`` and none of their hooks."""
    leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    results = [r for r in run(*leaves) if isinstance(r, torch.Tensor) and r.requires_grad]
    if results and wanted:
        torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results], allow_unused=True)
