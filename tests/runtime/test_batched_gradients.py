"""Several gradients at once through compiled functions, on AOTAutograd's path and on the short one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._vmap_internals import _vmap
from torch.autograd.functional import jacobian

from torchkiln.runtime.batched_gradients import over_slices

Function = Callable[..., Any]


def _plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh() * x.sum()


def _transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What torch hands back for a transposed result has other strides than the backward is compiled for."""
    return torch.tanh(x @ w).t().exp()


def _view_and_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Never on the short path: the result is a view of another one."""
    y = (x @ w).sin()
    y.mul_(2)
    return y.view(-1)


def _conjugate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.complex(x @ w, x).conj() * 2).sum(-1)


FUNCTIONS = [_plain, _view_and_write, _conjugate]


def _gradients(function: Function, count: int = 3) -> tuple[Any, ...]:
    torch.manual_seed(1)
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    result = function(x, w)
    return torch.autograd.grad(result, (x, w), torch.randn(count, *result.shape), is_grads_batched=True)


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_step_gives_the_gradients_of_eager(function: Function, dynamic: bool) -> None:
    compiled = torch.compile(function, backend="kiln", dynamic=dynamic, options={"fallback": False})
    for _ in range(3):
        torch.testing.assert_close(_gradients(compiled), _gradients(function))


@pytest.mark.usefixtures("everything_compiled")
def test_a_single_gradient() -> None:
    compiled = torch.compile(_plain, backend="kiln", options={"fallback": False})
    for _ in range(3):
        torch.testing.assert_close(_gradients(compiled, count=1), _gradients(_plain, count=1))


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("function", [_plain, _transposed])
def test_plain_gradients_before_between_and_after(function: Function) -> None:
    compiled = torch.compile(function, backend="kiln", options={"fallback": False})
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x, w).sum(), x)
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(compiled(x, w).sum(), x)[0], expected)
        torch.testing.assert_close(_gradients(compiled), _gradients(function))


@pytest.mark.usefixtures("everything_compiled")
def test_a_vectorized_jacobian_of_a_compiled_module() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2))
    compiled = torch.compile(model, backend="kiln", options={"fallback": False})
    for _ in range(3):
        x = torch.randn(4, 3)
        torch.testing.assert_close(jacobian(compiled, x, vectorize=True), jacobian(model, x))


def test_slices_of_two_levels() -> None:
    """Batched inside of batched, and one value that only the outer level has."""

    def product(values: list[Any]) -> list[Any]:
        return [values[0] @ values[1], None]

    matrices, vectors = torch.randn(2, 5, 3, 4), torch.randn(2, 4)

    def inner(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        result, nothing = over_slices(product, [matrix, vector])
        assert nothing is None
        return result

    def outer(several: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return _vmap(lambda matrix: inner(matrix, vector), 0, 0)(several)

    torch.testing.assert_close(
        _vmap(outer, (0, 0), 0)(matrices, vectors), torch.einsum("abij,aj->abi", matrices, vectors)
    )
