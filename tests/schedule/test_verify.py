"""The verifiers of kernels and plans: what scheduling makes passes, and each rule that is broken is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.config import Settings
from torchkiln.errors import VerificationError
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import FlatLoad, Load, Op, Parameter, ScratchRow
from torchkiln.ir.index import Var
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.kernel import Accumulate, GpuMapping, Kernel, Phase, Store
from torchkiln.schedule.plan import InArena, Launch, OwnTensor, Plan
from torchkiln.schedule.verify import verify_kernel, verify_plan
from torchkiln.target import capture_target, gpu_target


def _plan() -> Plan:
    """Three products with kernels between them, so that the arena holds several buffers at a time."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a = (x + 1) @ x
        b = (a.softmax(1) * 2) @ x
        return (b + a).softmax(1)

    traced = make_fx(function, tracing_mode="fake")(torch.randn(16, 16))
    target = capture_target(Settings())
    return schedule(lower(traced, Settings(), target), Settings(), target)


def _softmax() -> Kernel:
    """A kernel of several phases."""
    kernels = [step.kernel for step in _plan().steps if isinstance(step, Launch)]
    return max(kernels, key=lambda kernel: len(kernel.nest.phases))


def _first_store(kernel: Kernel, change: Callable[[Store], Store]) -> Kernel:
    """The kernel with its first store into memory changed."""
    phases = list(kernel.nest.phases)
    for k, phase in enumerate(phases):
        for name in ("before", "inside"):
            statements = list(getattr(phase, name))
            for n, statement in enumerate(statements):
                if isinstance(statement, Store) and isinstance(statement.memory, Parameter):
                    statements[n] = change(statement)
                    phases[k] = replace(phase, **{name: tuple(statements)})
                    return _nest(kernel, phases=tuple(phases))
    raise AssertionError("the kernel stores nothing")


def _nest(kernel: Kernel, **changed: Any) -> Kernel:
    return replace(kernel, nest=replace(kernel.nest, **changed))


def _mapping(kernel: Kernel, **changed: Any) -> Kernel:
    return replace(kernel, mapping=replace(kernel.mapping, **changed))


def test_what_scheduling_makes_is_right() -> None:
    verify_plan(_plan())
    assert len(_softmax().nest.phases) > 1


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (lambda k: _nest(k, phases=k.nest.phases[::-1]), "is not stored yet"),
        (lambda k: _nest(k, phases=k.nest.phases[1:]), "is not reduced yet"),
        (lambda k: _nest(k, phases=(k.nest.phases[0], *k.nest.phases)), "is reduced twice"),
        (lambda k: _nest(k, parameters=k.nest.parameters[:1]), "of None"),
        (lambda k: _nest(k, parameters=(torch.float64,) * len(k.nest.parameters)), "is not of torch.float32"),
        (lambda k: _nest(k, lane=Var("other", 3)), "other is no loop"),
        (lambda k: _mapping(k, tile=k.nest.lane), "the tile variable is the lane's"),
        (lambda k: _mapping(k, parallel_rows=9), "more parallel rows than rows"),
        (
            lambda k: _first_store(k, lambda s: replace(s, offset=ix.of(Var("other", 3)))),
            "no loop binds a variable of other",
        ),
        (
            lambda k: _first_store(k, lambda s: replace(s, value=ex.cast(s.value, torch.float64))),
            "torch.float64 into %",
        ),
        (
            lambda k: _first_store(k, lambda s: replace(s, value=Op("sin", (s.value, s.value), s.value.dtype))),
            "sin takes 1 operands, not 2",
        ),
        (
            lambda k: _first_store(k, lambda s: replace(s, value=FlatLoad(ScratchRow(9), s.offset, torch.float32))),
            "scratch9 is not of torch.float32",
        ),
        (
            lambda k: _first_store(k, lambda s: replace(s, value=Load("b0", (s.offset,), torch.float32))),
            "a load of a program's buffer",
        ),
        (
            lambda k: _nest(k, phases=(_other_reduction(k.nest.phases[0]), *k.nest.phases[1:])),
            "there is no reduction median",
        ),
    ],
)
def test_a_mistake_planted_in_a_kernel_is_named(plant: Callable[[Kernel], Kernel], named: str) -> None:
    verify_kernel(_softmax())
    with pytest.raises(VerificationError, match=named):
        verify_kernel(plant(_softmax()))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"threads": 40}, "no block has so many threads"),
        ({"threads": 2048}, "no block has so many threads"),
        ({"row_threads": 24}, "the threads of a row are no power of two"),
        ({"row_threads": 64}, "a row is shared by parts of a block"),
        ({"parts": 1}, "threads keep a part of a row"),
        ({"parallel_rows": 3}, "more parallel rows than rows"),
    ],
)
def test_a_mistake_planted_in_the_threads_of_a_kernel_is_named(changed: dict[str, int], named: str) -> None:
    traced = make_fx(lambda x: x.softmax(1), tracing_mode="fake")(torch.randn(16, 1000))
    target = gpu_target((9, 0))
    (step,) = schedule(lower(traced, Settings(), target), Settings(), target).steps
    assert isinstance(step, Launch)
    verify_kernel(step.kernel)
    assert isinstance(step.kernel.mapping, GpuMapping)
    with pytest.raises(VerificationError, match=named):
        verify_kernel(replace(step.kernel, mapping=replace(step.kernel.mapping, **changed)))


def _other_reduction(phase: Phase) -> Phase:
    inside = (replace(s, reducer="median") if isinstance(s, Accumulate) else s for s in phase.inside)
    return replace(phase, inside=tuple(inside))


def _in_one_place(plan: Plan) -> Plan:
    return replace(plan, storage={n: InArena(0) if isinstance(p, InArena) else p for n, p in plan.storage.items()})


def _beyond_the_arena(plan: Plan) -> Plan:
    return replace(plan, arena_bytes=64)


def _not_aligned(plan: Plan) -> Plan:
    moved = {n: InArena(p.offset + 4) if isinstance(p, InArena) else p for n, p in plan.storage.items()}
    return replace(plan, storage=moved, arena_bytes=plan.arena_bytes + 64)


def _output_in_arena(plan: Plan) -> Plan:
    return replace(plan, storage={n: InArena(0) if isinstance(p, OwnTensor) else p for n, p in plan.storage.items()})


def _freed_output(plan: Plan) -> Plan:
    owned = tuple(name for name, place in plan.storage.items() if isinstance(place, OwnTensor))
    return replace(plan, frees=(*plan.frees[:-1], (*plan.frees[-1], *owned)))


def _last_step_first(plan: Plan) -> Plan:
    return replace(plan, steps=(plan.steps[-1], *plan.steps[:-1]), frees=(plan.frees[-1], *plan.frees[:-1]))


def _no_place(plan: Plan) -> Plan:
    return replace(plan, storage={n: p for n, p in plan.storage.items() if not isinstance(p, InArena)})


def _one_buffer_less(plan: Plan) -> Plan:
    steps = [replace(s, buffers=s.buffers[:-1]) if isinstance(s, Launch) else s for s in plan.steps]
    return replace(plan, steps=tuple(steps))


def _one_number_more(plan: Plan) -> Plan:
    steps = [replace(s, sizes=(*s.sizes, 3)) if isinstance(s, Launch) else s for s in plan.steps]
    return replace(plan, steps=tuple(steps))


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (_in_one_place, "share memory while both live"),
        (_beyond_the_arena, "of 64 bytes"),
        (_not_aligned, "is not aligned"),
        (_output_in_arena, "is returned and has no memory of its own"),
        (_freed_output, "never freed, or freed and returned"),
        (_last_step_first, "is read before it is written"),
        (_no_place, "has no place"),
        (_one_buffer_less, "buffers"),
        (_one_number_more, "numbers for 0 sizes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_planted_in_a_plan_is_named(plant: Callable[[Plan], Plan], named: str) -> None:
    with pytest.raises(VerificationError, match=named):
        verify_plan(plant(_plan()))
