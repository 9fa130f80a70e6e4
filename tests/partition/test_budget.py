"""Budgets: results and gradients as eager's at every budget, memory that falls with it, errors that name the range."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.partition.measured import joint_graph, saved_bytes, step_peak
from tests.partition.models import CASES, LARGE_CASES, Case, Mlp, Transformer
from torchkiln.config import Settings
from torchkiln.errors import OptionError
from torchkiln.partition.budget import LADDER, Planner, SavedPlan, choose_saved_values
from torchkiln.partition.classify import NodeInfo
from torchkiln.target import capture_target

TARGET = capture_target(Settings())
BUDGETS = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cache
def _planner(case: Case) -> Planner:
    """Plans for the model as :func:`_model` makes it; a planner does not change its graph."""
    model, inputs = _model(case)
    joint = joint_graph(model, *inputs)
    return Planner(NodeInfo(joint.module.graph, joint.num_fwd_outputs), Settings(), TARGET)


def _model(case: Case) -> tuple[nn.Module, list[Tensor]]:
    """In double precision, so that a wrong value is not taken for rounding."""
    torch.manual_seed(0)
    model = case.make().double()
    return model, [value.double() if value.is_floating_point() else value for value in case.inputs()]


def _step(model: nn.Module, run: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Result, gradients and buffers after one step."""
    result = run(*inputs)
    weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view_as(result)
    (result * weights).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [result.detach(), *gradients, *model.buffers()]


def _check_step(case: Case, budget: float | str) -> None:
    """A step under ``budget`` is that of eager, and saves what was simulated."""
    model, inputs = _model(case)
    reference = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="kiln", fullgraph=True, options={"fallback": False, "memory_budget": budget})
    measured = saved_bytes(run, inputs, model)
    simulated = _planner(case).plan(budget).saved_bytes
    assert abs(simulated - measured) <= 0.05 * measured
    model.load_state_dict(reference.state_dict())  # the running statistics as before
    torch.testing.assert_close(_step(model, run, inputs), _step(reference, reference, inputs), rtol=1e-9, atol=1e-11)


@by_case
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_is_that_of_eager(case: Case, budget: float) -> None:
    _check_step(case, budget)


@by_case
def test_a_step_under_a_budget_in_bytes_is_that_of_eager(case: Case) -> None:
    peaks = [plan.peak_bytes for _, plan in _planner(case).ladder()]
    assert peaks[-1] < peaks[0]
    _check_step(case, f"{(peaks[0] + peaks[-1]) // 2}B")


@by_case
def test_the_peak_and_what_is_saved_never_grow_as_the_budget_falls(case: Case) -> None:
    planner = _planner(case)
    plans = [planner.plan(float(budget)) for budget in (1, 0.95, 0.8, 0.55, 0.5, 0.3, 0.12, 0.1, 0.02, 0)]
    for higher, lower in pairwise(plans):
        assert lower.peak_bytes <= higher.peak_bytes
        assert lower.saved_bytes <= higher.saved_bytes
    assert plans[-1].peak_bytes < 0.8 * plans[0].peak_bytes
    assert plans[-1].extra_seconds > plans[0].extra_seconds


@by_case
def test_a_share_limits_what_is_saved_where_it_can_be_reached(case: Case) -> None:
    planner = _planner(case)
    least = planner.plan(0.0).saved_bytes
    for budget in BUDGETS:
        assert planner.plan(budget).saved_bytes <= max(least, budget * planner.default.saved_bytes)


@by_case
def test_the_peak_stays_under_a_budget_in_bytes(case: Case) -> None:
    planner = _planner(case)
    high, low = planner.default.peak_bytes, min(plan.peak_bytes for plan in planner.candidates())
    before = high
    for k in range(5):
        limit = high - k * (high - low) // 4
        plan = planner.plan(f"{limit}B")
        assert plan.peak_bytes <= min(limit, before)
        before = plan.peak_bytes


@by_case
def test_bytes_that_cannot_be_reached_are_refused_with_the_least_that_can(case: Case) -> None:
    info = _planner(case).info
    with pytest.raises(OptionError, match=r"at least ([\d,]+) bytes") as caught:
        choose_saved_values(info, Settings(memory_budget="1KiB"), TARGET)
    least = int(str(caught.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    assert _planner(case).plan(f"{least}B").peak_bytes == least
    with pytest.raises(OptionError):
        _planner(case).plan(f"{least - 1}B")


def test_the_refusal_reaches_the_user_of_a_compiled_model() -> None:
    model = Mlp()
    run = torch.compile(model, backend="kiln", options={"memory_budget": "64B"})
    with pytest.raises(OptionError, match="take at least"):
        run(torch.randn(32, 64))


@pytest.mark.parametrize("budget", [-0.1, 1.5, 2, True, None, "much", "2 apples", "-1GiB"])
def test_a_budget_outside_of_the_range_names_the_range(budget: object) -> None:
    with pytest.raises(OptionError, match="from 0 to 1"):
        Settings(memory_budget=budget)


def test_budgets_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (("0.5", 0.5), ("1", 1.0), ("2GiB", "2GiB")):
        monkeypatch.setenv("KILN_MEMORY_BUDGET", text)
        assert torchkiln.config.resolve().memory_budget == wanted
    monkeypatch.setenv("KILN_MEMORY_BUDGET", "3")
    with pytest.raises(OptionError, match="from 0 to 1"):
        torchkiln.config.resolve()


@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_a_step_takes_about_as_much_memory_as_simulated_and_less_at_lower_budgets(case: Case) -> None:
    """Asked of the allocator. The simulation does not know which kernels are fused beside one another, whose results
    are then in memory at once. Convolutions also take memory for themselves, and their results lie outside of the
    arena, which is held at its full size meanwhile. Of small tensors, the memory is not used again.
    """
    torch.manual_seed(0)
    model, inputs = case.make(), case.inputs()
    joint = joint_graph(model, *inputs)
    planner = Planner(NodeInfo(joint.module.graph, joint.num_fwd_outputs), Settings(), TARGET)
    peaks = []
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        run = torch.compile(model, backend="kiln", fullgraph=True, options={"fallback": False, "memory_budget": budget})
        run(*inputs).sum().backward()
        model.zero_grad(set_to_none=True)
        peaks.append(step_peak(run, inputs))
        simulated = planner.plan(budget).peak_bytes
        assert (0.6 if case.name == "convnet" else 0.75) * peaks[-1] <= simulated <= 1.1 * peaks[-1]
        if budget == 1 and case.name != "convnet":
            assert abs(simulated - peaks[-1]) <= 0.05 * peaks[-1]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.8 * peaks[0]


@by_case
def test_the_default_saves_no_more_than_eager(case: Case) -> None:
    torch.manual_seed(0)
    model, inputs = case.make(), case.inputs()
    eager = saved_bytes(model, inputs, model)
    torch._dynamo.reset()
    assert saved_bytes(torch.compile(model, backend="kiln", options={"fallback": False}), inputs, model) <= eager


@pytest.mark.parametrize("solver", ["exact", "dynamic", "greedy"])
@pytest.mark.parametrize("costs", ["estimated", "profiled"])
def test_every_solver_and_every_way_to_know_costs_falls_with_the_budget(solver: Any, costs: Any) -> None:
    planner = Planner(_planner(CASES[1]).info, Settings(budget_solver=solver, recomputation_costs=costs), TARGET)
    plans: list[SavedPlan] = [plan for _, plan in planner.ladder()]
    assert len(plans) == len(LADDER)
    assert [plan.peak_bytes for plan in plans] == sorted((plan.peak_bytes for plan in plans), reverse=True)
    assert plans[5].saved_bytes <= LADDER[5] * planner.default.saved_bytes


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
@pytest.mark.parametrize(
    "make", [lambda: Mlp(dropout=0.5), lambda: Transformer(dropout=0.5)], ids=["mlp", "transformer"]
)
def test_dropout_in_what_is_recomputed_draws_what_eager_draws(make: Callable[[], nn.Module], budget: float) -> None:
    torch.manual_seed(0)
    model = make().double()
    inputs = torch.randn(32, 64, dtype=torch.float64) if isinstance(model, Mlp) else torch.randint(50, (2, 16))
    reference = copy.deepcopy(model)
    options = {"fallback": False, "rng": "eager", "memory_budget": budget}
    run = torch.compile(model, backend="kiln", fullgraph=True, options=options)
    torch.manual_seed(7)
    got = _step(model, run, (inputs,))
    torch.manual_seed(7)
    torch.testing.assert_close(got, _step(reference, reference, (inputs,)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("rng", ["fused", "eager"])
def test_masks_of_forward_and_backward_are_the_same(rng: str, budget: float) -> None:
    """Through linear layers that copy: the gradient of an element is not zero exactly where the element is not."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.eye(64)) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = nn.functional.dropout((x @ weight).exp().log(), 0.2)
            return x

    x = (torch.rand(16, 64) + 1).requires_grad_()
    options = {"fallback": False, "rng": rng, "memory_budget": budget}
    result = torch.compile(Copies(), backend="kiln", fullgraph=True, options=options)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    # Dropped once, an element is 0, and log(exp(0)) keeps it there; kept each time, it is scaled by 1.25 each time.
    torch.testing.assert_close((result != 0).float() * 1.25**6, gradient, rtol=1e-4, atol=1e-5)
    assert 0.1 < (result != 0).float().mean() < 0.5
