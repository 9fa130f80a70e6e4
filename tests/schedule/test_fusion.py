"""Fusion: how many kernels known patterns become, and that any grouping keeps the results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import capture, compiled, difference, specimen
from torchkiln.config import Settings
from torchkiln.ir.program import Loop
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.dependencies import predecessors, reads, writes
from torchkiln.schedule.fusion import fuse
from torchkiln.schedule.limits import CPU
from torchkiln.schedule.plan import Launch, Plan
from torchkiln.target import capture_target

Function = Callable[..., Any]
TARGET = capture_target(Settings())


def plan_of(function: Function, *inputs: torch.Tensor, **options: Any) -> Plan:
    settings_used = Settings(**options)
    return schedule(lower(capture(function, inputs), settings_used, TARGET), settings_used, TARGET)


def kernels(function: Function, *inputs: torch.Tensor) -> int:
    plan = plan_of(function, *inputs)
    assert all(isinstance(step, Launch) for step in plan.steps), "only generated code is expected here"
    return len(plan.steps)


X = torch.zeros(64, 256)
W, B = torch.zeros(256), torch.zeros(256)
IMAGE = torch.zeros(8, 16, 12, 12)


def _nll(x: torch.Tensor) -> tuple[torch.Tensor]:
    # As a loss does: the log-probability of a class per row, by index.
    return (x.log_softmax(1).gather(1, torch.zeros(64, 1, dtype=torch.int64)).neg(),)


PATTERNS: dict[str, tuple[int, Function, tuple[torch.Tensor, ...]]] = {
    "pointwise chain": (1, lambda x: (((x * 2 + 1).sin() * x).exp() - x,), (X,)),
    "two results of one input": (1, lambda x: (x.sin(), x.cos() * 2), (X,)),
    "shared part": (1, lambda x: (lambda y: (y + 1, y * 2))(x.exp()), (X,)),
    "softmax": (1, lambda x: (x.softmax(1),), (X,)),
    "scaled masked softmax": (1, lambda x: ((x * 0.125).masked_fill(x > 1, -1e9).softmax(-1),), (X,)),
    "log_softmax": (1, lambda x: (x.log_softmax(1),), (X,)),
    "softmax, then pointwise": (1, lambda x: (x.softmax(1) * 2 + 1,), (X,)),
    "layer norm": (1, lambda x, w, b: (F.layer_norm(x, (256,), w, b),), (X, W, B)),
    "layer norm and gelu": (1, lambda x, w, b: (F.gelu(F.layer_norm(x, (256,), w, b)),), (X, W, B)),
    "residual layer norm": (1, lambda x, w, b: (lambda y: (y, F.layer_norm(y, (256,), w, b)))(x * 2 + 1), (X, W, B)),
    "RMS norm": (1, lambda x, w: (F.rms_norm(x, (256,), w),), (X, W)),
    "sums and shifted halves": (1, lambda x: ((x * x.roll(64, 1)).sum(0), torch.cat((x[:, 64:], x[:, :64]), 1)), (X,)),
    "row statistics": (1, lambda x: (x.sum(1), x.amax(1), x.var(1)), (X,)),
    "reduction and epilogue": (1, lambda x: (x.sum(1) * 2 + 1,), (X,)),
    "producer and reduction": (1, lambda x: ((x * x + 1).sum(1),), (X,)),
    "sum and mean of one row": (1, lambda x: (x.exp().sum(1), x.exp().mean(1)), (X,)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_known_patterns_become_one_kernel(name: str) -> None:
    expected, function, inputs = PATTERNS[name]
    assert kernels(function, *inputs) == expected


def test_log_probability_of_a_class_needs_no_probabilities_in_memory() -> None:
    plan = plan_of(_nll, X)
    assert sum(isinstance(step, Launch) for step in plan.steps) <= 2  # one of them checks the positions
    assert plan.peak_bytes < X.nbytes


def test_batch_norm_in_training_reads_its_input_in_few_kernels() -> None:
    def function(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)

    # Statistics with their parts, the final sums with the running statistics, and the result.
    assert kernels(function, IMAGE, torch.zeros(16), torch.ones(16)) <= 5


def test_without_fusion_every_operation_is_a_kernel() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (((x * 2) + 1).sin(),)

    assert len(plan_of(function, X, fuse=False).steps) == 3
    assert len(plan_of(function, X).steps) == 1


def test_a_broadcast_dear_value_is_computed_once_per_element() -> None:
    """exp of a row vector used in a matrix of 64 rows: 256 exponentials, not 64 times that."""
    plan = plan_of(lambda x, w: (x * w.exp().sin(),), X, W)
    stored = {name for step in plan.steps if isinstance(step, Launch) for name in step.buffers}
    assert len(plan.steps) == 2 or len(stored) > 3


def _random_graph(seed: int) -> tuple[Function, list[torch.Tensor]]:
    """A DAG of pointwise steps, reductions, views, products and writes into an input over 6 x 6 matrices."""
    pick = random.Random(seed)
    plan = [(pick.randrange(10), pick.random(), pick.random()) for _ in range(pick.randint(4, 16))]
    kept = [pick.random() < 0.4 for _ in plan]

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [a, b]
        for kind, left, right in plan:
            x, y = values[int(left * len(values))], values[int(right * len(values))]
            values.append(
                (
                    lambda x, y: x + y,
                    lambda x, y: (x * 0.5).sin(),
                    lambda x, y: x * y.sum(0),
                    lambda x, y: x - y.amax(1, keepdim=True),
                    lambda x, y: x.t() + y,
                    lambda x, y: (x @ y) * 0.1,
                    lambda x, y: torch.cat([x[:3], y[3:]]),
                    lambda x, y: x.softmax(1),
                    lambda x, y: torch.where(y > 0, x, y),
                    lambda x, y: x.flip(1) * y.mean(),
                )[kind](x, y).clamp(-4, 4)
            )
        if plan[0][1] < 0.3:
            a.copy_(values[-1])
        return tuple(v for v, keep in zip(values[2:], kept, strict=True) if keep) or (values[-1],)

    return function, [specimen(torch.float64, (6, 6), 1, tame=True), specimen(torch.float64, (6, 6), 2, tame=True)]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_any_grouping_of_a_random_graph_gives_eagers_results(seed: int) -> None:
    function, inputs = _random_graph(seed)
    copies = [x.clone() for x in inputs]
    wanted = function(*copies)
    for options in ({}, {"fuse": False}, {"inline_limit": 0}):
        for got, value in zip(
            compiled(function, inputs, **options)(*[x.clone() for x in inputs]), wanted, strict=False
        ):
            assert difference(got.contiguous(), value.contiguous(), slack=1000) is None, f"seed {seed}, {options}"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_groups_run_after_everything_they_need(seed: int) -> None:
    function, inputs = _random_graph(seed)
    program = lower(capture(function, inputs), Settings(), TARGET)
    done: list[Any] = []
    for unit in fuse(program, CPU):
        done.extend(unit.members if hasattr(unit, "members") else [unit])
    assert len(done) == len(program.operations)
    # Members are rewritten into the group's variables; the buffer each writes tells which operation it was.
    written = [tuple(sorted(writes(op))) for op in program.operations]
    if len(set(written)) < len(written):
        return
    place = {tuple(sorted(writes(op))): k for k, op in enumerate(done)}
    for position, before in enumerate(predecessors(program.operations)):
        assert all(place[written[p]] < place[written[position]] for p in before)


def test_dependencies_follow_memory() -> None:
    """Read after write, write after read, write after write."""
    captured = capture(lambda a, b: (a.add_(1), b.copy_(a * 2), a.mul_(3)), [torch.zeros(3), torch.zeros(3)])
    program = lower(captured, Settings(), TARGET)
    before = predecessors(program.operations)
    last: dict[str, int] = {}
    for position, operation in enumerate(program.operations):
        assert isinstance(operation, Loop)
        for name in reads(operation) | writes(operation):
            if name in last:
                assert last[name] in _closure(before, position) | {position}
        for name in writes(operation):
            last[name] = position


def _closure(before: list[set[int]], position: int) -> set[int]:
    found: set[int] = set()
    stack = [position]
    while stack:
        for p in before[stack.pop()]:
            if p not in found:
                found.add(p)
                stack.append(p)
    return found


def _stretches(count: int) -> Function:
    """Stretches one after the other, each begun anew from an input, and a value at the end that reads what the first
    of them begins with.
    """

    def function(x: torch.Tensor, flag: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = flag * 2
        gradient = start @ w
        for k in range(count):
            again = (((x + k) @ w).sin() @ w).cos() @ w
            gradient = (gradient * again) @ w
        return gradient, start.exp()

    return function


def test_a_unit_completed_late_does_not_let_later_stretches_overtake_what_waits_for_it() -> None:
    """Otherwise the memory of all stretches is held at once."""
    inputs = [torch.zeros(64, 64) for _ in range(3)]
    few, many = (plan_of(_stretches(count), *inputs) for count in (4, 12))
    assert many.arena_bytes == few.arena_bytes


@pytest.mark.parametrize(("products", "wanted"), [(1, 1), (20, 2)])
def test_loops_far_apart_that_read_the_same_input_are_not_one_kernel(products: int, wanted: int) -> None:
    """The sine would be computed at once with the cosine, and lie in memory over all products between."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        y = x.cos()
        for _ in range(products):
            y = y @ w
        return (y @ x.sin(),)

    plan = plan_of(function, torch.zeros(64, 64), torch.zeros(64, 64))
    assert sum(isinstance(step, Launch) for step in plan.steps) == wanted


def test_a_group_prints_its_loops_and_members() -> None:
    program = lower(capture(lambda x: x / x.sum(1, keepdim=True), [torch.ones(4, 8)]), Settings(), TARGET)
    (group,) = fuse(program, CPU)
    assert str(group).splitlines() == [
        "rows i0 < 4 columns r0 < 8",
        "  b1[i0] = sum(r0 < 8: a0[i0, r0])",
        "  b2[i0, r0] = div(a0[i0, r0], b1[i0])",
    ]


def test_a_finished_program_cannot_be_changed() -> None:
    program = lower(capture(lambda x: x + 1, [torch.ones(4)]), Settings(), TARGET)
    with pytest.raises(TypeError):
        program.buffers["new"] = program.buffers["a0"]  # type: ignore[index]
    with pytest.raises(TypeError):
        del plan_of(lambda x: x + 1, torch.ones(4)).storage["a0"]  # type: ignore[attr-defined]
