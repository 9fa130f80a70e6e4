"""Time of every step of a graph, taken by its native function itself; only with the setting ``profile``.

The module has a variable of two 64-bit numbers for each step, how often it ran and for how many nanoseconds. A clock is
read between one step and the next, so that the parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchkiln.artifact.artifact import TIMES_SYMBOL, Route, StepKind, TimedStep
from torchkiln.codegen.llvm.frame import Frame
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.ir.checks import is_check
from torchkiln.ir.program import ExternCall
from torchkiln.ir.sorting import is_sort
from torchkiln.schedule.plan import Launch, Plan, Step
from torchkiln.schedule.traffic import only_moves, sizes_of, tensors_of, traffic_of

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
            module.declare("declare i32 @clock_gettime(i32, ptr)")
            count = 2 * (len(_AROUND) + len(plan.steps))
            module.define(TIMES_SYMBOL, f"@{TIMES_SYMBOL} = global [{count} x i64] zeroinitializer, align 16")
            module.define("kiln_clock", _CLOCK)
            module.define("kiln_lap", _LAP)

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        return (*_AROUND, *self._steps) if self._running else ()

    def before_steps(self, frame: Frame) -> None:
        if self._running:
            frame.line(_lap(_IN_RUN, 0))

    def after_step(self, frame: Frame, step: Step, name: str, route: Route | None) -> None:
        """``name`` is the symbol of a kernel or the operator that is called, by ``route``."""
        if self._running:
            frame.line(_lap(len(_AROUND) + len(self._steps), 1))
            self._steps.append(_timed(step, self._plan, name, route))

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
    return f"call void @kiln_lap(ptr %clock, i64 {2 * slot}, i64 {calls})"


_CLOCK = f"""define internal i64 @kiln_clock() noinline nounwind {{
  %time = alloca [2 x i64], align 16
  %status = call i32 @clock_gettime(i32 {_CLOCK_MONOTONIC}, ptr %time)
  %seconds = load i64, ptr %time
  %rest = getelementptr i64, ptr %time, i64 1
  %nanoseconds = load i64, ptr %rest
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %nanoseconds
  ret i64 %now
}}"""

# Several threads may run one graph.
_LAP = f"""define internal void @kiln_lap(ptr %clock, i64 %place, i64 %calls) noinline nounwind {{
  %now = call i64 @kiln_clock()
  %before = load i64, ptr %clock
  store i64 %now, ptr %clock
  %taken = sub i64 %now, %before
  %count = getelementptr i64, ptr @{TIMES_SYMBOL}, i64 %place
  %time = getelementptr i64, ptr %count, i64 1
  %c = atomicrmw add ptr %count, i64 %calls monotonic
  %t = atomicrmw add ptr %time, i64 %taken monotonic
  ret void
}}"""


def _timed(step: Step, plan: Plan, name: str, route: Route | None) -> TimedStep:
    traffic = traffic_of(step, plan)
    kind: StepKind = "check"
    if isinstance(step, Launch):
        kind = "copy" if only_moves(step.kernel) else "kernel"
    elif isinstance(step, ExternCall) and is_sort(step):
        kind = "kernel"
    elif isinstance(step, ExternCall) and not is_check(step):
        kind = "python" if route == "python" else "copy" if step.target in _COPIES else "library"
        name = f"{name} {_shapes([sizes_of(view.shape) for view in tensors_of(step.arguments)])}"
    return TimedStep(name, kind, traffic.bytes, traffic.operations, step.origin.nodes, step.origin.source)


def _shapes(shapes: Sequence[tuple[int, ...]], most: int = 3) -> str:
    texts = ["×".join(map(str, shape)) or "()" for shape in shapes[:most]]
    return ", ".join(texts) + (", …" if len(shapes) > most else "")
