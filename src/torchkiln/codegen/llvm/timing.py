"""Time of every step of a graph, taken by its native function itself; only with the setting ``profile``.

The module has three 64-bit numbers for each step: how often it ran, for how many nanoseconds, and the complement of
the least. The clock is read between steps, so that the parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from torchkiln.artifact.artifact import TIMES_PER_STEP, TIMES_SYMBOL, Route, StepKind, TimedStep
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.functions import Function, Register, native
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.ir.native_calls import is_check, is_computed
from torchkiln.ir.program import ExternCall
from torchkiln.schedule.dependencies import tensors_of
from torchkiln.schedule.plan import Launch, Plan, Step
from torchkiln.schedule.traffic import only_moves, sizes_of, traffic_of

_CLOCK_MONOTONIC = 1

# The first two are no steps of the plan; the others follow in its order.
_AROUND = (
    TimedStep("reading inputs, wrapping outputs", "entry"),
    TimedStep("checks of inputs, arena, views of outputs", "entry"),
)
_IN_ENTRY, _IN_RUN = range(len(_AROUND))
_COPIES = frozenset((torch.ops.aten.clone.default, torch.ops.aten.copy.default, torch.ops.aten.copy_.default))


class Clock:
    """Instructions that take the time between the steps of one graph; none at all where it is not ``running``."""

    def __init__(self, module: ModuleBuilder, plan: Plan, *, running: bool) -> None:
        self._running = running
        self._plan = plan
        self._steps: list[TimedStep] = []
        if running:
            count = TIMES_PER_STEP * (len(_AROUND) + len(plan.steps))
            module.define(TIMES_SYMBOL, f"@{TIMES_SYMBOL} = global [{count} x i64] zeroinitializer, align 16")
            _add_lap.define(module)

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        return (*_AROUND, *self._steps) if self._running else ()

    def before_steps(self, frame: Frame) -> None:
        if self._running:
            frame.emit(_lap(_IN_RUN, 0))

    def after_step(self, frame: Frame, step: Step, name: str, route: Route | None) -> None:
        """``name`` is the symbol of a kernel or the operator that is called, by ``route``."""
        if self._running:
            frame.emit(_lap(len(_AROUND) + len(self._steps), 1))
            timed = _timed(step, self._plan, name, route)
            self._steps.append(replace(timed, source=frame.texts.source(step.origin)))

    def begin(self) -> list[str]:
        """At the start of the native function."""
        begin = ["  %clock = alloca i64", "  %begin = call i64 @kiln_clock()", "  store i64 %begin, ptr %clock"]
        return begin if self._running else []

    def end_of_run(self) -> list[str]:
        return [f"  {_lap(_IN_RUN, 1)}"] if self._running else []

    def around_run(self) -> tuple[str, str, str, str]:
        """Text for the function that Python calls: at its start, before and after it runs the graph, at its end."""
        if not self._running:
            return "", "", "", ""
        start = "\n".join(("", *self.begin()))
        after = "\n  %back = call i64 @kiln_clock()\n  store i64 %back, ptr %clock"
        return start, f"\n  {_lap(_IN_ENTRY, 0)}", after, f"\n  {_lap(_IN_ENTRY, 1)}"


def _lap(slot: int, calls: int) -> str:
    return f"call void @kiln_lap(ptr %clock, i64 {TIMES_PER_STEP * slot}, i64 {calls})"


@native("i64 kiln_clock()", attributes="noinline")
def _clock(f: Function) -> None:
    """Nanoseconds since some moment."""
    time = f.alloca("i64", 2)
    f.call("clock_gettime", _CLOCK_MONOTONIC, time)
    f.ret(time[0] * 1_000_000_000 + time[1])


@native("void kiln_lap(i64*, i64, i64)", attributes="noinline")
def _add_lap(f: Function, clock: Register, place: Register, calls: Register) -> None:
    """Add the time since the last lap, and ``calls``, to the numbers at ``place``; several threads may do so."""
    now = f.call(_clock)
    taken = now - clock[0]
    clock[0] = now
    count = Register(f, "i64*", f"@{TIMES_SYMBOL}").at(place)
    f.atomic("add", count, calls)
    f.atomic("add", count.at(1), taken)
    # The numbers start as 0, which as a complement is longer than any time.
    f.atomic("umax", count.at(2), taken * -1 - 1)


def _timed(step: Step, plan: Plan, name: str, route: Route | None) -> TimedStep:
    traffic = traffic_of(step, plan)
    kind: StepKind = "check"
    if isinstance(step, Launch):
        kind = "copy" if only_moves(step.kernel) else "kernel"
    elif isinstance(step, ExternCall) and is_computed(step):
        kind = "kernel"
    elif isinstance(step, ExternCall) and not is_check(step):
        kind = "python" if route == "python" else "copy" if step.target in _COPIES else "library"
        name = f"{name} {_shapes([sizes_of(view.shape) for view in tensors_of(step.arguments)])}"
    return TimedStep(name, kind, traffic.bytes, traffic.operations, step.origin.nodes)


def _shapes(shapes: Sequence[tuple[int, ...]], most: int = 3) -> str:
    texts = ["×".join(map(str, shape)) or "()" for shape in shapes[:most]]
    return ", ".join(texts) + (", …" if len(shapes) > most else "")
