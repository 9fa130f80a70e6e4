"""What a program's run looks at: writes to results before the backward pass, gradients that add up, errors."""

from __future__ import annotations

from typing import Any

import torch

from tests.programs.standalone import differences, expected, run

Made = tuple[list[Any], list[Any]]


def _make() -> Made:
    x = torch.linspace(-1, 1, 6).requires_grad_()
    return [x], [x]


def _exponential(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.exp(),)


def _double(outputs: list[torch.Tensor]) -> None:
    outputs[0].mul_(2)


def test_where_eager_refuses_a_write_compiled_may_refuse_too_or_give_its_gradient() -> None:
    wanted = expected(_exponential, _make, after=_double)
    seed = torch.linspace(-1, 1, 6)
    assert "inplace" in wanted["error"]
    torch.testing.assert_close(wanted["gradient 0"], 2 * seed * seed.exp())

    def careful(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.exp() + 0,)

    def careless(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.exp() + x - x.detach(),)

    assert not list(differences(wanted, run(_exponential, _make(), _double), {}))
    assert not list(differences(wanted, run(careful, _make(), _double), {"gradient 0": 1e-6}))
    rounding = {"output 0": 1e-6, "gradient 0": 1e-6}
    assert [name for name, _ in differences(wanted, run(careless, _make(), _double), rounding)] == ["gradient 0"]


def test_an_error_where_eager_gives_a_gradient_is_a_difference() -> None:
    def careful(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.exp() + 0,)

    wanted = expected(careful, _make, after=_double)
    assert "error" not in wanted
    found = dict(differences(wanted, run(_exponential, _make(), _double), {}))
    assert "inplace" in found["the backward pass"]


class _Sharing(torch.autograd.Function):
    """A sum whose gradients are one tensor, as no sum of eager's leaves them in two leaves."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b.view(a.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = gradient.clone()
        return one.detach(), one.view(-1)


def test_gradients_that_share_memory_are_a_difference_and_add_up_wrongly() -> None:
    def make() -> Made:
        a, b = torch.zeros(2, 3, requires_grad=True), torch.zeros(6, requires_grad=True)
        return [a, b], [a, b]

    how = {"steps": 3, "between": lambda g: g.mul_(0.5)}
    wanted = expected(lambda a, b: (a + b.view(a.shape),), make, **how)
    seed = torch.linspace(-1, 1, 6)
    torch.testing.assert_close(wanted["gradient 1"], seed * (0.5 + 0.25 + 0.125))
    got = run(lambda a, b: (_Sharing.apply(a, b),), make(), **how)
    names = [name for name, _ in differences(wanted, got, {})]
    assert names == ["gradient 0", "gradient 1", "memory of gradients shared"]


def test_results_are_compared_before_and_after_a_write() -> None:
    def view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 3
        return y, y[1:]

    def copy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 3, (x * 3)[1:]

    wanted = expected(view, _make, after=_double)
    assert not list(differences(wanted, run(view, _make(), _double), {}))
    assert "output 1 afterwards" in [name for name, _ in differences(wanted, run(copy, _make(), _double), {})]
