"""The memory plan: nothing alive at one time overlaps, memory is used again, the peak is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.test_fusion import plan_of
from torchkiln.ir.program import Buffer, ExternCall, Input, Program, StridedView
from torchkiln.schedule.memory import plan_memory
from torchkiln.schedule.plan import InArena, InDonatedInput, InInput, Launch, OwnTensor

ALIGNMENT = 64

lifetimes = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(0, 12), st.integers(0, 12)).map(
        lambda t: (t[0], min(t[1:]), max(t[1:]))
    ),
    min_size=1,
    max_size=25,
)


def _program(sizes: list[tuple[int, int, int]], outputs: list[int]) -> tuple[Program, list[Any]]:
    """Steps that touch each buffer at the beginning and the end of its life."""
    buffers = {f"b{k}": Buffer(f"b{k}", torch.uint8, (n,), (1,)) for k, (n, _, _) in enumerate(sizes)}
    count = max(last for _, _, last in sizes) + 1
    kernel: Any = None
    steps = [
        Launch(kernel, tuple(f"b{k}" for k, (_, first, last) in enumerate(sizes) if position in (first, last)))
        for position in range(count)
    ]
    views = tuple(StridedView(f"b{k}", torch.uint8, (sizes[k][0],), (1,)) for k in outputs)
    return Program((), (), buffers, (), views), steps


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lifetimes, st.data())
def test_buffers_alive_at_one_time_never_overlap(sizes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    outputs = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=3))
    program, steps = _program(sizes, outputs)
    plan = plan_memory(program, steps)
    spans = []
    for k, (size, first, last) in enumerate(sizes):
        place = plan.storage[f"b{k}"]
        if k in outputs:
            assert place == OwnTensor(), "a result outlives the arena"
            continue
        assert isinstance(place, InArena)
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= 0
        assert place.offset + size <= plan.arena_bytes
        spans.append((place.offset, place.offset + size, first, last))
    for k, (low, high, first, last) in enumerate(spans):
        for other_low, other_high, other_first, other_last in spans[:k]:
            together = first <= other_last and other_first <= last
            assert not together or high <= other_low or other_high <= low


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lifetimes)
def test_the_peak_is_between_what_is_alive_at_once_and_everything(sizes: list[tuple[int, int, int]]) -> None:
    program, steps = _program(sizes, [])
    plan = plan_memory(program, steps)
    alive = max(sum(n for n, first, last in sizes if first <= t <= last) for t in range(13))
    everything = sum(-(-max(n, 1) // ALIGNMENT) * ALIGNMENT for n, _, _ in sizes)
    assert alive <= plan.peak_bytes <= everything


@settings(max_examples=200, deadline=None, derandomize=True)
@given(lifetimes, st.lists(st.tuples(st.integers(0, 1 << 17), st.integers(0, 12)), min_size=1, max_size=5))
def test_inputs_are_used_again_only_after_their_last_use(
    sizes: list[tuple[int, int, int]], inputs: list[tuple[int, int]]
) -> None:
    sizes = [(16 * n, first, last) for n, first, last in sizes]
    program, steps = _program(sizes, [])
    given_buffers = {f"a{k}": Buffer(f"a{k}", torch.uint8, (n,), (1,)) for k, (n, _) in enumerate(inputs)}
    steps += [Launch(None, ()) for _ in range(13 - len(steps))]  # type: ignore[arg-type]
    for k, (_, last) in enumerate(inputs):
        steps[last] = Launch(steps[last].kernel, (*steps[last].buffers, f"a{k}"))
    # The last one belongs to the caller.
    graph_inputs = tuple(Input(f"a{k}", f"a{k}", donated=k < len(inputs) - 1) for k in range(len(inputs)))
    plan = plan_memory(Program(graph_inputs, (), {**program.buffers, **given_buffers}, (), ()), steps)
    spans: list[tuple[int, int, int, int, int]] = []
    used: dict[int, int] = {}
    for k, (size, first, last) in enumerate(sizes):
        place = plan.storage[f"b{k}"]
        if isinstance(place, OwnTensor):
            continue
        assert isinstance(place, (InArena, InDonatedInput))
        where = -1
        if isinstance(place, InDonatedInput):
            where = place.position
            assert where < len(inputs) - 1
            assert inputs[where][1] < first
            assert place.offset + size <= inputs[where][0]
            used[where] = max(used.get(where, 0), place.offset + size)
        spans.append((where, place.offset, place.offset + size, first, last))
    for where, nbytes in plan.reused:
        assert used.pop(where, 0) <= nbytes <= inputs[where][0]
    assert not used
    for k, (where, low, high, first, last) in enumerate(spans):
        for other, other_low, other_high, other_first, other_last in spans[:k]:
            together = where == other and first <= other_last and other_first <= last
            assert not together or high <= other_low or other_high <= low


@pytest.mark.parametrize("length", [4, 40])
def test_a_chain_of_products_needs_two_buffers_however_long_it_is(length: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(length):
            x = (x @ x).relu()
        return (x,)

    x = torch.zeros(32, 32)
    plan = plan_of(function, x)
    assert plan.arena_bytes <= 3 * x.nbytes
    assert plan.peak_bytes <= 4 * x.nbytes


def test_results_of_operators_are_freed_after_their_last_reader() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(6):
            x = x.logcumsumexp(0) * 0.5
        return (x,)

    plan = plan_of(function, torch.zeros(50))
    freed = [name for names in plan.frees for name in names]
    own = {r for step in plan.steps if isinstance(step, ExternCall) for r in step.results if r is not None}
    assert own <= set(freed)
    assert len(freed) == len(set(freed))
    for position, names in enumerate(plan.frees):
        for name in names:
            later = plan.steps[position + 1 :]
            assert not any(name in (s.buffers if isinstance(s, Launch) else str(s.arguments)) for s in later)


def test_inputs_and_results_are_not_in_the_arena() -> None:
    plan = plan_of(lambda x, y: ((x @ y).sin(), x + y), torch.zeros(8, 8), torch.zeros(8, 8))
    assert isinstance(plan.storage[plan.program.inputs[0].buffer or ""], InInput)
    for output in plan.program.outputs:
        assert isinstance(output, StridedView)
        assert plan.storage[output.buffer] == OwnTensor()


def test_a_value_fused_away_takes_no_memory() -> None:
    plan = plan_of(lambda x: ((x.exp() + 1).sin().sum(1),), torch.zeros(64, 64))
    assert plan.arena_bytes == 0
