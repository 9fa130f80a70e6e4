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
from torchkiln.ir.expr import FlatLoad, Interleaved, Load, Op, Parameter, ScratchRow
from torchkiln.ir.index import Size, Var
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.kernel import Accumulate, GpuMapping, Kernel, Phase, Statement, Store
from torchkiln.schedule.plan import InArena, InConstant, InDonatedInput, InInput, InSlot, Launch, OwnTensor, Plan
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
        (lambda k: _nest(k, folded=6), "no power of two"),
        (lambda k: _nest(k, folded=8), "not those of rows"),
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
        (lambda k: _nest(k, columns=(k.nest.lane, Var("other", 3))), "the lane variable is not the innermost one"),
        (
            lambda k: _first_store(k, lambda s: replace(s, offset=s.offset * ix.of(Size("s7", 1, 9, 3)))),
            "size s7 is not given",
        ),
        (lambda k: _kept_one_further(k), r"offset r0 \+ 1 of scratch0 is not in 16"),
        (
            lambda k: _first_store(k, lambda s: replace(s, value=Interleaved((s.value, s.value)))),
            "interleaved values that are not stored by a kernel without columns",
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


def _kept_one_further(kernel: Kernel) -> Kernel:
    """Scratch rows written from their second element on."""
    phases = []
    for phase in kernel.nest.phases:
        further = (
            replace(s, offset=s.offset + 1) if isinstance(s, Store) and isinstance(s.memory, ScratchRow) else s
            for s in phase.inside
        )
        phases.append(replace(phase, inside=tuple(further)))
    return _nest(kernel, phases=tuple(phases))


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


def _without_the_last_step(plan: Plan) -> Plan:
    return replace(plan, steps=plan.steps[:-1], frees=plan.frees[:-1])


def _no_place(plan: Plan) -> Plan:
    return replace(plan, storage={n: p for n, p in plan.storage.items() if not isinstance(p, InArena)})


def _one_buffer_less(plan: Plan) -> Plan:
    steps = [replace(s, buffers=s.buffers[:-1]) if isinstance(s, Launch) else s for s in plan.steps]
    return replace(plan, steps=tuple(steps))


def _one_number_more(plan: Plan) -> Plan:
    steps = [replace(s, sizes=(*s.sizes, 3)) if isinstance(s, Launch) else s for s in plan.steps]
    return replace(plan, steps=tuple(steps))


def _with_kernels(plan: Plan, change: Callable[[Kernel], Kernel]) -> Plan:
    steps = [replace(s, kernel=change(s.kernel)) if isinstance(s, Launch) else s for s in plan.steps]
    return replace(plan, steps=tuple(steps))


def _one_element_further(plan: Plan) -> Plan:
    return _with_kernels(plan, lambda k: _first_store(k, lambda s: replace(s, offset=s.offset + 1)))


def _before_the_first_element(plan: Plan) -> Plan:
    return _with_kernels(plan, lambda k: _first_store(k, lambda s: replace(s, offset=s.offset - 1)))


def _loads_one_row_further(plan: Plan) -> Plan:
    def further(statement: Statement) -> Statement:
        value = statement.value
        load = next(node for node in ex.walk((value,)) if isinstance(node, FlatLoad) and node.memory == Parameter(0))
        moved = FlatLoad(load.memory, load.offset + 16, load.dtype)
        return replace(statement, value=Op("add", (value, moved), value.dtype))

    def change(kernel: Kernel) -> Kernel:
        first, *others = kernel.nest.phases
        statement, *rest = first.inside
        return _nest(kernel, phases=(replace(first, inside=(further(statement), *rest)), *others))

    return _with_kernels(plan, change)


def _other_parameters(plan: Plan) -> Plan:
    """Buffers of another dtype than the kernels were built for."""
    program = plan.program
    buffers = {name: replace(buffer, dtype=torch.int32) for name, buffer in program.buffers.items()}
    return replace(plan, program=replace(program, buffers=buffers))


def _no_frees_of_the_last_step(plan: Plan) -> Plan:
    return replace(plan, frees=plan.frees[:-1])


def _freed_from_the_arena(plan: Plan) -> Plan:
    name = next(name for name, place in plan.storage.items() if isinstance(place, InArena))
    return replace(plan, frees=(*plan.frees[:-1], (*plan.frees[-1], name)))


def _freed_too_early(plan: Plan) -> Plan:
    """A temporary with memory of its own that goes before its last reader."""
    name = next(name for name, place in plan.storage.items() if isinstance(place, InArena))
    first = next(k for k, step in enumerate(plan.steps) if isinstance(step, Launch) and name in step.buffers)
    frees = tuple((name,) if k == first else () for k in range(len(plan.steps)))
    return replace(plan, storage={**plan.storage, name: OwnTensor()}, frees=frees)


def _in_another_input(plan: Plan) -> Plan:
    return replace(plan, storage={n: InInput(9) if isinstance(p, InInput) else p for n, p in plan.storage.items()})


def _in_a_constant_that_is_not_there(plan: Plan) -> Plan:
    return replace(plan, storage={n: InConstant(0) if isinstance(p, InInput) else p for n, p in plan.storage.items()})


def _in_an_input_that_is_read(plan: Plan) -> Plan:
    """The first result in the memory of the input, which later steps read."""
    name = next(name for name, place in plan.storage.items() if isinstance(place, InArena))
    return replace(plan, storage={**plan.storage, name: InDonatedInput(0, 0)})


def _beyond_an_input(plan: Plan) -> Plan:
    name = next(name for name, place in plan.storage.items() if isinstance(place, InArena))
    return replace(plan, storage={**plan.storage, name: InDonatedInput(0, 64)})


def _in_one_slot(plan: Plan) -> Plan:
    return replace(plan, storage={n: InSlot(0) if isinstance(p, InArena) else p for n, p in plan.storage.items()})


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (_in_one_place, "share memory while both live"),
        (_beyond_the_arena, "of 64 bytes"),
        (_not_aligned, "is not aligned"),
        (_output_in_arena, "is returned and has no memory of its own"),
        (_freed_output, "never freed, or freed and returned"),
        (_last_step_first, "is read before it is written"),
        (_without_the_last_step, "is returned and never written"),
        (_no_place, "has no place"),
        (_one_buffer_less, "buffers"),
        (_one_number_more, "numbers for 0 sizes"),
        (_one_element_further, r"offset i0 \+ 1 of b1 is not in 256"),
        (_before_the_first_element, r"offset i0 \+ -1 of b1 is not in 256"),
        (_loads_one_row_further, r"offset i0 \+ 16 of a0 is not in 256"),
        (_other_parameters, "is of torch.int32, not torch.float32"),
        (_no_frees_of_the_last_step, "frees of another number of steps"),
        (_freed_from_the_arena, "is freed and has no memory of its own"),
        (_freed_too_early, "was freed before"),
        (_in_another_input, "is not that input"),
        (_in_a_constant_that_is_not_there, "is not that constant"),
        (_in_an_input_that_is_read, "is written while a0 is read"),
        (_beyond_an_input, "of 1024 bytes"),
        (_in_one_slot, "share memory while both live"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_planted_in_a_plan_is_named(plant: Callable[[Plan], Plan], named: str) -> None:
    with pytest.raises(VerificationError, match=named):
        verify_plan(plant(_plan()))


def test_interleaved_values_leave_no_gaps_and_stay_inside() -> None:
    traced = make_fx(lambda x: torch.cat([x, x.neg()], 1), tracing_mode="fake")(torch.randn(32, 1))
    target = capture_target(Settings())
    plan = schedule(lower(traced, Settings(), target), Settings(), target)
    verify_plan(plan)
    (step,) = [step for step in plan.steps if isinstance(step, Launch)]
    lane = step.kernel.nest.lane
    assert lane is not None
    with pytest.raises(VerificationError, match="2 interleaved values 3 apart"):
        verify_kernel(_first_store(step.kernel, lambda s: replace(s, offset=ix.of(lane) * 3)))
    further = _first_store(step.kernel, lambda s: replace(s, offset=s.offset + 1))
    with pytest.raises(VerificationError, match=r"offset 2\*i0 \+ 2 of .* is not in 64"):
        verify_plan(replace(plan, steps=tuple(replace(s, kernel=further) if s is step else s for s in plan.steps)))
