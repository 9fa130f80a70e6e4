"""Cat before pointwise: which operations move, and which must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad.sink_cat import sink_cats

A, B = torch.randn(4, 6, requires_grad=True), torch.randn(4, 3, requires_grad=True)


def _pass(function: Callable[..., Any], *inputs: Any) -> tuple[bool, str]:
    gm = capture(function, *inputs)
    normalize_calls(gm)
    for number, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node._rename("ab"[number])
    changed = sink_cats(gm)
    assert_same(gm, function, *inputs)
    return changed, "; ".join(line.partition(" = ")[2] or line for line in text(gm).splitlines())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: torch.cat([a.relu(), F.relu(b)], 1), "cat([a, b], dim=1); relu(cat_1); return (relu_2,)"),
        (
            lambda a, b: torch.cat([(a * 2).tanh(), (b * 2).tanh()], -1),
            "cat([a, b], dim=1); mul(cat_2, 2); tanh(mul_2); return (tanh_2,)",
        ),
        (
            lambda a, b: torch.cat([F.leaky_relu(a, 0.1), F.leaky_relu(b, 0.1)], -1),
            "cat([a, b], dim=1); leaky_relu(cat_1, negative_slope=0.1); return (leaky_relu_2,)",
        ),
    ],
)
def test_operations_move_behind_the_cat(function: Callable[..., Any], expected: str) -> None:
    assert _pass(function, A, B) == (True, expected)


def _written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = a * 2
    first = x.relu()
    x.add_(1)
    return torch.cat([first, b.relu()], 1) + x.sum()


def _result_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first = a.sin()
    first.mul_(3)
    return torch.cat([first, b.sin()], 1)


def _whole_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.cat([a.exp(), b.exp()], 1)
    y.mul_(2)  # allowed for a cat, not for exp, whose backward reads the result
    return y


def _without_gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        first = a.relu()
    return torch.cat([first, b.relu()], 1)


@pytest.mark.parametrize(
    "function",
    [
        _written,
        _result_written,
        _whole_written,
        _without_gradient,
        lambda a, b: torch.cat([a.relu(), b.tanh()], 1),
        lambda a, b: torch.cat([a * 2, b * 2.5], 1),
        lambda a, b: torch.cat([a.double().relu(), b.relu()], 1),
        lambda a, b: (torch.cat([y := a.relu(), b.relu()], 1), y),  # computed twice otherwise
        lambda a, b: torch.cat([a.softmax(1), b.softmax(1)], 1),
        lambda a, b: torch.cat([a + a, b + b], 1),
    ],
)
def test_others_stay(function: Callable[..., Any]) -> None:
    assert not _pass(function, A, B)[0]


def test_compiled(compile_strictly: Callable[..., Any]) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.gelu(a), F.gelu(b)], 1)

    result, expected = compile_strictly(function)(A, B), function(A, B)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result.square().sum(), (A, B)), torch.autograd.grad(expected.square().sum(), (A, B))
    )
