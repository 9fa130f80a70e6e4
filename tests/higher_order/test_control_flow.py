"""cond, while_loop, scan and map: compiled bodies, called as eager calls them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import map as map_slices
from torch._higher_order_ops import scan, while_loop

import torchkiln
from tests.higher_order.against_eager import check, compiled
from torchkiln.errors import FallbackWarning

Tensor = torch.Tensor
WEIGHT = torch.linspace(-1, 1, 6)


def _choose(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + WEIGHT, lambda x: x.cos() * WEIGHT, (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("training", [False, True])
def test_cond_takes_the_branch_the_predicate_says(sign: float, training: bool) -> None:
    check(_choose, (sign * torch.rand(4, 6)).requires_grad_(training))


def test_cond_reads_its_predicate_at_every_call() -> None:
    run = compiled(_choose)
    for sign in (1, -1, 1):
        x = sign * torch.rand(4, 6)
        torch.testing.assert_close(run(x), _choose(x))


def test_cond_with_several_results_and_layouts() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        def left(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x @ y, (x.t() + 1).contiguous()

        def right(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return (y.t() @ x.t()).t().contiguous(), x.t().sin().contiguous()

        a, b = torch.cond(x.sum() > y.sum(), left, right, (x, y))
        return a * 2, b.t()

    for scale in (1.0, -1.0):
        check(function, torch.rand(3, 5) * scale, torch.rand(5, 3) * -scale, again=scale < 0)


def test_cond_on_views_and_computed_arguments() -> None:
    def function(x: Tensor) -> Tensor:
        operands = ((x * 2).t(), x[:, 1:4])
        return torch.cond(x[0, 0] > 0, lambda a, b: a.sum(1) + b.sum(), lambda a, b: a.mean(1) * b.sum(), operands)

    check(function, torch.rand(6, 5))
    check(function, -torch.rand(6, 5), again=True)


def test_nested_cond() -> None:
    def function(x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            return torch.cond(x.max() > 0.5, lambda x: x.exp(), lambda x: x.tanh(), (x,))

        return torch.cond(x.sum() > 0, outer, lambda x: x - 1, (x,)) * 2

    for scale in (1.0, 0.1, -1.0):
        check(function, (scale * torch.rand(7).clamp(min=0.6)).requires_grad_(), again=scale < 1)


def _power(x: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    def goes_on(i: Tensor, x: Tensor) -> Tensor:
        return i < steps

    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, (x * 1.5).sin() + WEIGHT

    return while_loop(goes_on, body, (torch.zeros((), dtype=torch.int64), x))


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_while_loop_runs_as_often_as_its_condition_holds(steps: int) -> None:
    check(_power, torch.randn(3, 6), torch.tensor(steps))


def test_a_while_loop_that_never_runs_returns_a_copy() -> None:
    x = torch.randn(3, 6)
    _, result = compiled(_power)(x, torch.tensor(0))
    result.add_(1)
    torch.testing.assert_close(result, x + 1)


def test_while_loop_over_tensors_in_other_layouts() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return while_loop(
            lambda i, x: i.sum() < 4, lambda i, x: (i + 1, (x * 1.5).tanh() + x.sum()), (torch.zeros(1), x.t())
        )

    check(function, torch.randn(4, 4) / 4)


def test_cond_inside_while_loop_inside_cond() -> None:
    def function(x: Tensor) -> Tensor:
        def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.cond(i % 2 == 0, lambda x: x + WEIGHT, lambda x: x * 0.5, (x,))

        def loop(x: Tensor) -> Tensor:
            return while_loop(lambda i, x: i < 5, step, (torch.zeros((), dtype=torch.int64), x))[1]

        return torch.cond(x.sum() > 0, loop, lambda x: x.clone(), (x,))

    check(function, torch.rand(2, 6))
    check(function, -torch.rand(2, 6), again=True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan_carries_and_stacks(training: bool, reverse: bool) -> None:
    def function(start: Tensor, xs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = (carry @ weight + x).tanh()
            return new, new * 2

        return scan(step, start, xs, reverse=reverse)

    check(
        function,
        torch.randn(2, 4, dtype=torch.float64).requires_grad_(training),
        torch.randn(5, 2, 4, dtype=torch.float64).requires_grad_(training),
        torch.randn(4, 4, dtype=torch.float64).requires_grad_(training),
    )


def test_scan_along_an_inner_dimension_with_trees() -> None:
    def function(start: dict[str, Tensor], xs: Tensor) -> Any:
        def step(carry: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
            new = {"sum": carry["sum"] + x, "max": torch.maximum(carry["max"], x)}
            return new, (new["sum"] - new["max"], x.exp())

        return scan(step, start, xs, dim=1)

    check(function, {"sum": torch.zeros(3), "max": torch.full((3,), -9.0)}, torch.randn(3, 6))


@pytest.mark.parametrize("training", [False, True])
def test_map_over_slices(training: bool) -> None:
    def function(xs: Tensor, y: Tensor) -> Tensor:
        return map_slices(lambda x, y: (x @ y).sin().sum(0), xs, y)

    check(function, torch.randn(4, 3, 5).requires_grad_(training), torch.randn(5, 2).requires_grad_(training))


def test_a_module_with_parameters_in_a_branch() -> None:
    class Gate(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.left(x).relu(), lambda x: self.right(x), (x,))

    module = Gate()
    run = compiled(module)
    for scale in (1, -1):
        x = scale * torch.rand(4, 5)
        sides = []
        for call in (module, run):
            module.zero_grad()
            result = call(x)
            result.square().sum().backward()
            sides.append((result, [p.grad for p in module.parameters()]))
        torch.testing.assert_close(sides[1], sides[0])


def test_dropout_in_a_branch_draws_as_eager_draws() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: torch.bernoulli(x), lambda x: x.clone(), (x,))
        return y + torch.bernoulli(x.abs())

    with torchkiln.settings(rng="eager"):
        check(function, torch.rand(50))
        check(function, -torch.rand(50), again=True)


def test_bodies_run_as_generated_code() -> None:
    before = torchkiln.stats()
    compiled(_power)(torch.randn(3, 6), torch.tensor(2))
    after = torchkiln.stats()
    assert after.launches - before.launches >= 2  # the condition and the body
    grown = {name for name, count in after.extern_calls.items() if count > before.extern_calls.get(name, 0)}
    assert grown == {"higher_order.while_loop"}


def _live_bytes(run: Callable[[], Any]) -> int:
    """The most bytes of tensors alive at once while ``run`` runs, beyond those alive before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    balance = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            balance += event.nbytes()
            most = max(most, balance)
    return most


def test_a_loop_needs_no_more_memory_the_longer_it_runs() -> None:
    run = compiled(_power)
    x = torch.randn(4096, 6)
    run(x, torch.tensor(1))
    gc.collect()
    short = _live_bytes(lambda: run(x, torch.tensor(3)))
    long = _live_bytes(lambda: run(x, torch.tensor(40)))
    size = x.numel() * 4
    assert short >= size
    assert long <= short + size // 2


def test_a_failure_in_a_body_names_the_users_line() -> None:
    def function(x: Tensor, index: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, i: x[i].exp(), lambda x, i: x[:2].clone(), (x, index))  # the line

    run = compiled(function)
    x = torch.rand(5)
    run(x, torch.tensor([0, 4]))
    with pytest.raises(IndexError, match="the line"):
        run(x, torch.tensor([0, 5]))
    torch.testing.assert_close(run(x, torch.tensor([1, 2])), x[1:3].exp())


def test_a_loop_that_carries_a_number_says_why_it_is_not_compiled() -> None:
    def function(x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (0, x))[1]

    torchkiln.reset_stats()
    x = torch.rand(4)
    with pytest.warns(FallbackWarning):
        result = torch.compile(function, backend="kiln")(x)
    torch.testing.assert_close(result, x.sin().sin().sin())
    assert "number" in torchkiln.stats().fallbacks[0].reason


def _dynamically(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, dynamic=True, options={"fallback": False})


@pytest.mark.parametrize("rows", [3, 5])
def test_bodies_on_sizes_that_change(rows: int) -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x * 2).sum(0), lambda x: x.amax(0), (x,)) / x.shape[0]

    def loop(x: Tensor) -> Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() * x.shape[0]), (torch.zeros(()), x))[1]

    def steps(start: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda c, x: (c + x, c * x.shape[0]), start, xs)

    def slices(xs: Tensor) -> Tensor:
        return map_slices(lambda x, y: x + y.sum(0), xs, xs * 2)

    for sign in (1, -1):
        x = sign * torch.rand(rows, 6)
        torch.testing.assert_close(_dynamically(branches)(x), branches(x))
    x = torch.rand(rows, 6)
    torch.testing.assert_close(_dynamically(loop)(x), loop(x))
    torch.testing.assert_close(_dynamically(steps)(torch.zeros(6), x), steps(torch.zeros(6), x))
    torch.testing.assert_close(_dynamically(slices)(x), slices(x))


def test_training_through_a_branch_on_sizes_that_change() -> None:
    run = _dynamically(_choose)
    for rows in (2, 3, 5):
        sides = []
        for call in (_choose, run):
            x = torch.linspace(-1, 2, rows * 6).view(rows, 6).requires_grad_()
            result = call(x)
            sides.append((result, torch.autograd.grad(result.square().sum(), x)))
        torch.testing.assert_close(sides[1], sides[0])


def test_a_branch_nobody_reads_is_not_run() -> None:
    def function(x: Tensor) -> Tensor:
        torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return x + 1

    before = torchkiln.stats().extern_calls.get("higher_order.cond", 0)
    check(function, torch.rand(3))
    assert torchkiln.stats().extern_calls.get("higher_order.cond", 0) == before


@pytest.mark.parametrize("options", [{"passes_limit": 0}, {"fuse": False, "checks": True}])
def test_bodies_without_optional_passes_and_with_checks(options: dict[str, object]) -> None:
    check(_choose, torch.rand(4, 6).requires_grad_(), **options)
    check(_power, torch.rand(2, 6), torch.tensor(3), **options)


def test_every_iteration_draws_numbers_of_its_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        _, drawn = scan(lambda c, x: (c + 1, torch.rand_like(x)), x[0], x)
        last = while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, torch.rand_like(y)), (torch.zeros(()), x[0]))[1]
        return drawn, last

    run = compiled(function)
    x = torch.zeros(4, 50)
    torch.manual_seed(1)
    drawn, last = run(x)
    assert torch.cat((drawn, last[None])).unique().numel() == 250
    torch.manual_seed(1)
    torch.testing.assert_close(run(x), (drawn, last))
