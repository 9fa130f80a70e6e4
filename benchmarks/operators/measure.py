"""One cell: compiled by every backend in one process, compared with eager, and timed in rounds that take turns."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

import torchkiln
from benchmarks.operators.cells import Cell, Job
from benchmarks.operators.entry import Call, in_layouts
from conformance.cases import seed_everything
from conformance.compare import as_near_as_eager, cotangents, difference, in_float64, roughly_equal, tensors_of
from conformance.foreseen import foreseen_layouts
from torchkiln.bench.backends import BACKENDS, Compile, torch_compile
from torchkiln.bench.records import BASE, OURS, Figures
from torchkiln.errors import first_line

# Calls whose median is the overhead, and bytes that pass through the caches before each at the most.
_CALLS_OF_NOTHING, _MOST_PASSED = 60, 1 << 25


@dataclass(frozen=True)
class Effort:
    """Rounds of each backend, and the seconds of a round; one has at least one call.

    Shorter than ``shortest`` seconds in eager, a call is left out: it would measure the overhead of a call. Longer
    than ``longest`` it is left out too.
    """

    rounds: int = 9
    seconds: float = 0.008
    shortest: float = 40e-6
    longest: float = 0.3


class LeftOut(Exception):
    """This cell says nothing; the message says why."""


def measure(call: Call, cell: Cell, backends: Sequence[str], effort: Effort) -> dict[str, Any]:
    """Figures by backend as a JSON object; or why the cell is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _measure(call, cell, backends, effort)
        except LeftOut as reason:
            return {"left_out": str(reason)}
        finally:
            torch._dynamo.reset()
            gc.collect()


def _measure(call: Call, cell: Cell, backends: Sequence[str], effort: Effort) -> dict[str, Any]:
    changed = in_layouts(call, cell.layout)
    if changed is None:
        raise LeftOut("its operand has no such layout")
    step = _Step(changed, cell.job)
    clock = clock_for(cell.threads)
    steps: dict[str, Callable[[], Any]] = {}
    figures: dict[str, Figures] = {}
    for backend in backends:
        if backend == BASE:
            steps[backend] = step.eager
            seconds = min(_seconds(step.eager, 1, clock) for _ in range(3))
            figures[backend] = Figures(first_seconds=seconds)
            if not effort.shortest <= seconds <= effort.longest:
                raise LeftOut(f"eager takes {1e6 * seconds:.0f} µs")
            continue
        try:
            steps[backend], figures[backend] = _compiled(step, backend)
        except Exception as error:
            figures[backend] = Figures(failure=f"{type(error).__name__}: {first_line(error)}"[:300])
    rounds = interleaved(steps, effort, clock)
    figures |= {
        name: replace(figures[name], ms=1000 * statistics.median(times), rounds=tuple(1000 * t for t in times))
        for name, times in rounds.items()
    }
    tensors = tensors_of((changed.args, changed.kwargs))
    passed = sum(tensor.nbytes for tensor in (*tensors, *tensors_of(step.expected)))
    nbytes = min(_MOST_PASSED, 1 << passed.bit_length())
    count = min(max(len(tensors), 1), 4)
    return {
        "figures": {name: asdict(figures[name]) for name in backends},
        "sizes": changed.sizes,
        "wrong": step.wrong.get(OURS, ""),
        "overhead_us": 1e6 * overhead(cell.job, count, cell.threads, nbytes) if OURS in steps else 0.0,
    }


class _Step:
    """What is timed of a call, in eager and compiled, and what eager's results are."""

    def __init__(self, call: Call, job: Job) -> None:
        self.call, self.job = call, job
        self.wrong: dict[str, str] = {}
        self.inputs = [t for t in tensors_of((call.args, call.kwargs)) if t.requires_grad and t.is_leaf]
        self.weights: list[Tensor] = []
        if job is Job.backward and not self.inputs:
            raise LeftOut("no input has a gradient")
        try:
            seed_everything(0)
            if job is Job.backward:
                found = self._differentiable(call.function(*call.args, **call.kwargs))
                if not found:
                    raise LeftOut("no result has a gradient")
                # Laid out as the results are, which AOTAutograd takes for granted and else copies them to be.
                self.weights = [
                    torch.empty_like(result).copy_(weight)
                    for result, weight in zip(found, cotangents(found), strict=True)
                ]
            seed_everything(0)
            self.expected = self.eager()
        except LeftOut:
            raise
        except Exception as error:
            raise LeftOut(f"eager fails: {first_line(error)}"[:200]) from None

    def eager(self) -> Any:
        return self.run(self.call.function)

    def run(self, function: Callable[..., Any]) -> Any:
        """Results, of backward the gradients too."""
        if self.job is Job.forward:
            with torch.no_grad():
                return function(*self.call.args, **self.call.kwargs)
        return self._gradients(function, self.call, self.inputs, self.weights)

    def _gradients(self, function: Callable[..., Any], call: Call, inputs: list[Tensor], weights: list[Tensor]) -> Any:
        results = function(*call.args, **call.kwargs)
        return torch.autograd.grad(self._differentiable(results), inputs, weights, allow_unused=True)

    def _differentiable(self, results: Any) -> list[Tensor]:
        picked = self.call.for_gradient(results) if self.call.for_gradient is not None else results
        return [t for t in tensors_of(picked) if t.requires_grad]

    def judge(self, backend: str, found: Any) -> None:
        """Keep what is wrong with these results."""
        wrong = difference(found, self.expected, values=False)
        # What the captured graph gives when torch runs it, as it is or laid out as fake tensors foresee, is not ours.
        captures = (torch_compile("aot_eager"), torch_compile(foreseen_layouts))
        if wrong is not None and any(self._gives(capture, found, values=False) for capture in captures):
            wrong = None
        if wrong is None and self.call.has_values and difference(found, self.expected) is not None:
            wrong = as_near_as_eager(found, self.expected, self._exact())
            if wrong is not None and (self._gives(captures[0], found) or self._differs_by_rounding_only(found)):
                wrong = None
        if wrong is not None:
            self.wrong[backend] = wrong[:300]

    def _exact(self) -> Any:
        args, kwargs = in_float64((self.call.args, self.call.kwargs))
        wide = _Step(replace(self.call, args=args, kwargs=kwargs), Job.forward)
        if self.job is Job.forward:
            return wide.expected
        return self._gradients(wide.call.function, wide.call, wide.inputs, [w.double() for w in self.weights])

    def _differs_by_rounding_only(self, found: Any) -> bool:
        """Whether ours, of half types, gives what eager does once every operation rounds as eager's do."""
        is_half = any(t.dtype is torch.bfloat16 for t in tensors_of((self.call.args, self.call.kwargs)))
        rounded = torch_compile(OURS, fallback=False, adaptive=False, precision="eager")
        return is_half and roughly_equal(found, self.expected) and self._gives(rounded, self.expected)

    def _gives(self, compile_it: Compile, results: Any, *, values: bool = True) -> bool:
        torch._dynamo.reset()
        seed_everything(0)
        try:
            given = self.run(compile_it(_plain(self.call.function), False))
        except Exception:
            return False
        return difference(given, results, values=values) is None


def _compiled(step: _Step, backend: str) -> tuple[Callable[[], Any], Figures]:
    torch._dynamo.reset()
    before = torchkiln.stats()
    function = BACKENDS[backend].compile(_plain(step.call.function), False)
    start = time.perf_counter()
    seed_everything(0)
    found = step.run(function)
    seconds = time.perf_counter() - start
    after = torchkiln.stats()
    step.judge(backend, found)
    made = {name: count - before.extern_calls.get(name, 0) for name, count in after.extern_calls.items()}
    return (
        lambda: step.run(function),
        Figures(
            first_seconds=seconds,
            externs={name: count for name, count in made.items() if count},
            launches=after.launches - before.launches,
        ),
    )


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function: Dynamo does not compile a builtin by itself."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def clock_for(threads: int) -> Callable[[], float]:
    """On one thread the time it had a processor, which a busy machine disturbs least; on several that of the clock."""
    return time.thread_time if threads == 1 else time.perf_counter


def _seconds(step: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        step()
    return (clock() - start) / calls


def interleaved(
    steps: Mapping[str, Callable[[], Any]], effort: Effort, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of a call in each round. Every round all have a turn, in an order that changes from round to round."""
    calls: dict[str, int] = {}
    for name, step in steps.items():
        step()
        calls[name] = max(1, round(effort.seconds / max(_seconds(step, 2, clock), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for number in range(effort.rounds):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            times[name].append(_seconds(steps[name], calls[name], clock))
    return times


@cache
def overhead(job: Job, tensors: int, threads: int, nbytes: int) -> float:
    """Seconds that a compiled call of ours takes longer than eager's with nothing to compute: tensors of one element.

    Measured after ``nbytes`` have passed through the caches, as a cell leaves them: Dynamo's guards and the call then
    come from memory. (Forward, and with backward, µs of eager and ours, one thread of a Xeon with 2 MiB of second
    cache: 2 and 10, 19 and 40; after 6 MiB 9 and 45, 55 to 101 and 110 to 125, as many as Dynamo around eager takes.)
    """

    def product(*given: Tensor) -> Tensor:
        result = given[0] * 2.0
        for tensor in given[1:]:
            result = result * tensor
        return result

    call = Call(product, tuple(torch.ones(1, requires_grad=True) for _ in range(tensors)))
    step = _Step(call, job)
    compiled, _ = _compiled(step, OURS)
    passed, clock = torch.zeros(nbytes // 4), clock_for(threads)

    def after_others(step: Callable[[], Any]) -> float:
        times = []
        for _ in range(_CALLS_OF_NOTHING):
            passed.add_(1)
            times.append(_seconds(step, 1, clock))
        return statistics.median(times)

    return max(0.0, after_others(compiled) - after_others(step.eager))
