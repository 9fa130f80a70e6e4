"""Autocast inside and around compiled functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.higher_order.against_eager import check, compiled

Tensor = torch.Tensor
HALF = {"rtol": 2e-2, "atol": 2e-2}


def _network(x: Tensor, weight: Tensor) -> Tensor:
    return F.softmax(F.gelu(x @ weight) @ weight, -1).sum(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [False, True])
def test_autocast_inside(dtype: torch.dtype, training: bool) -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=dtype):
            inner = _network(x, weight)
        return inner, x @ weight

    inner, outer = check(
        function,
        torch.randn(4, 6).requires_grad_(training),
        (torch.randn(6, 6) / 3).requires_grad_(training),
        tolerance=HALF,
    )
    assert outer.dtype == torch.float32
    assert inner.dtype == dtype


@pytest.mark.parametrize("training", [False, True])
def test_autocast_around(training: bool) -> None:
    run = compiled(lambda x, w: x @ w)
    x = torch.randn(4, 6).requires_grad_(training)
    weight = torch.randn(6, 5).requires_grad_(training)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, expected = run(x, weight), x @ weight
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected)
    if training:
        got = torch.autograd.grad(result.float().square().sum(), (x, weight))
        wanted = torch.autograd.grad(expected.float().square().sum(), (x, weight))
        torch.testing.assert_close(got, wanted, **HALF)
    assert run(x, weight).dtype == torch.float32  # outside again


def test_autocast_that_is_off_inside_one_that_is_on() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = x @ weight
            with torch.autocast("cpu", enabled=False):
                high = x @ weight
        return low, high

    low, high = check(function, torch.randn(4, 6), torch.randn(6, 6), tolerance=HALF)
    assert (low.dtype, high.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_around_a_branch() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: (x @ w).sin(), (x, weight))

    check(function, torch.rand(4, 6), torch.randn(6, 6), tolerance=HALF)
