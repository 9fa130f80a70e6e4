"""Dual numbers through compiled functions, against eager's forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import torchkiln
from tests.higher_order.against_eager import compiled
from torchkiln.errors import FallbackWarning

Tensor = torch.Tensor
Functions = Mapping[str, Callable[..., Tensor]]

POINTWISE: Functions = {
    "add": lambda x, y: x + 2 * y,
    "sub": lambda x, y: 1 - x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y.abs() + 1),
    "pow": lambda x, y: (x.abs() + 1) ** y,
    "square": lambda x, y: x**2,
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: (x.abs() + 1).log(),
    "sin": lambda x, y: x.sin(),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "sqrt": lambda x, y: (x.abs() + 1).sqrt(),
    "rsqrt": lambda x, y: (x.abs() + 1).rsqrt(),
    "erf": lambda x, y: x.erf(),
    "abs": lambda x, y: x.abs(),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "maximum": lambda x, y: torch.maximum(x, y),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "relu": lambda x, y: F.relu(x),
    "gelu": lambda x, y: F.gelu(x),
    "silu": lambda x, y: F.silu(x),
    "softplus": lambda x, y: F.softplus(x),
    "atan2": lambda x, y: torch.atan2(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
}

REDUCTIONS: Functions = {
    "sum": lambda x, y: x.sum(),
    "sum of rows": lambda x, y: (x * y).sum(0),
    "mean": lambda x, y: x.mean(1, keepdim=True),
    "var": lambda x, y: x.var(1),
    "std": lambda x, y: x.std(0),
    "amax": lambda x, y: x.amax(1),
    "max": lambda x, y: x.max(1).values,
    "prod": lambda x, y: x.prod(1),
    "norm": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "softmax": lambda x, y: x.softmax(1) * y,
    "log_softmax": lambda x, y: x.log_softmax(0),
    "cumsum": lambda x, y: x.cumsum(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[1]),
    "mse": lambda x, y: F.mse_loss(x, y),
}

MATMULS: Functions = {
    "mm": lambda x, y: x @ y,
    "turned": lambda x, y: x.t() @ y.t(),
    "mv": lambda x, y: x @ y[0],
    "dot": lambda x, y: x[0].dot(y[1]),
    "bmm": lambda x, y: torch.bmm(x.view(2, 2, 4), y.view(2, 4, 2)),
    "matmul": lambda x, y: torch.matmul(x.view(2, 2, 4), y),
    "addmm": lambda x, y: torch.addmm(x, x, y, beta=0.5, alpha=2.0),
    "linear": lambda x, y: F.linear(x, y, y[0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "conv": lambda x, y: F.conv1d(x[None], y.view(2, 4, 2)),
}


def _duals(function: Callable[..., Any], *pairs: tuple[Tensor, Tensor | None]) -> Any:
    with forward_ad.dual_level():
        inputs = [x if t is None else forward_ad.make_dual(x, t) for x, t in pairs]
        results = function(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return [tuple(forward_ad.unpack_dual(result)) for result in results]


@pytest.mark.parametrize(
    "functions", [POINTWISE, REDUCTIONS, MATMULS], ids=["pointwise", "reductions", "matrix products"]
)
def test_tangents_are_those_of_eager(functions: Functions) -> None:
    def together(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x, y) for function in functions.values())

    pairs = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2)]
    run = compiled(together)
    before = torchkiln.stats()
    results = _duals(run, *pairs)
    after = torchkiln.stats()
    for name, got, wanted in zip(functions, results, _duals(together, *pairs), strict=True):
        assert wanted[1] is not None
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert after.fallbacks == before.fallbacks
    assert after.launches > before.launches


def test_only_some_inputs_and_results_have_tangents() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x * y, y + 1, x.argmax(), x.detach()

    run = compiled(function)
    pairs = [(torch.randn(5), torch.randn(5)), (torch.randn(5), None)]
    got, wanted = _duals(run, *pairs), _duals(function, *pairs)
    torch.testing.assert_close([p for p, _ in got], [p for p, _ in wanted])
    assert [t is None for _, t in got] == [t is None for _, t in wanted] == [False, True, True, True]
    torch.testing.assert_close(got[0], wanted[0])


def test_plain_calls_inside_and_outside_a_level_stay_plain() -> None:
    run = compiled(lambda x: x.sin())
    x = torch.randn(3)
    torch.testing.assert_close(run(x), x.sin())
    with forward_ad.dual_level():
        result = run(x)
        assert forward_ad.unpack_dual(result).tangent is None
        torch.testing.assert_close(result, x.sin())


def test_a_tangent_in_another_layout() -> None:
    run = compiled(lambda x: (x * x).sum(0))
    x = torch.randn(3, 3)
    for tangent in (torch.randn(3, 3), torch.randn(3, 3).t(), torch.randn(3).expand(3, 3).clone()):
        torch.testing.assert_close(_duals(run, (x, tangent)), _duals(lambda x: (x * x).sum(0), (x, tangent)))


def test_a_module_in_forward_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    pair = (torch.randn(3, 4), torch.randn(3, 4))
    torch.testing.assert_close(_duals(compiled(module), pair), _duals(module, pair))


def test_reverse_over_forward() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).sum(-1)

    x, tangent = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    sides = []
    for call in (function, compiled(function)):
        ((_, derivative),) = _duals(call, (x, tangent))
        sides.append(torch.autograd.grad(derivative.sum(), x))
    torch.testing.assert_close(sides[1], sides[0])


def test_a_function_that_writes_to_a_dual_input_runs_eagerly_and_says_so() -> None:
    def function(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sin()

    pair = (torch.randn(3), torch.randn(3))
    torchkiln.reset_stats()
    with pytest.warns(FallbackWarning, match="writes to its inputs"):
        got = _duals(torch.compile(function, backend="kiln"), (pair[0].clone(), pair[1].clone()))
    torch.testing.assert_close(got, _duals(function, (pair[0].clone(), pair[1].clone())))
    assert "writes to its inputs" in torchkiln.stats().fallbacks[0].reason
