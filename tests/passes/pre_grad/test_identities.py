"""Identities: calls that return their argument go; what eager would see a difference in stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.identities import remove_identities
from torchkiln.canonicalize.torch_calls import normalize_calls

X = torch.randn(4, 6, requires_grad=True)


def _pass(function: Callable[..., Any], *inputs: Any) -> tuple[bool, str]:
    gm = capture(function, *inputs)
    normalize_calls(gm)
    gm.graph.find_nodes(op="placeholder")[0]._rename("x")
    changed = remove_identities(gm)
    assert_same(gm, function, *inputs)
    return changed, "; ".join(line.partition(" = ")[2] or line for line in text(gm).splitlines())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.float32).sin(),
        lambda x: x.to("cpu").sin(),
        lambda x: x.float().sin(),
        lambda x: x.type_as(x).sin(),
        lambda x: x.contiguous().sin(),
        lambda x: x.flatten(1).sin(),
        lambda x: F.dropout(x, 0.5, training=False).sin(),
        lambda x: x.view(4, 6).sin(),
        lambda x: x.view(4, -1).sin(),
        lambda x: x.reshape(4, 6).sin(),
        lambda x: x.expand(-1, 6).sin(),
        lambda x: x.permute(0, 1).sin(),
        lambda x: x.transpose(1, -1).sin(),
        lambda x: x[:].sin(),
        lambda x: x.squeeze().sin(),
    ],
)
def test_what_returns_its_argument_goes(function: Callable[..., Any]) -> None:
    assert _pass(function, X) == (True, "sin(x); return (sin,)")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.float64).sin(),
        lambda x: x.to(torch.float32, copy=True),
        lambda x: x.t().contiguous().sin(),
        lambda x: x.view(6, 4).sin(),
        lambda x: x.view(4, 6),  # the user gets a tensor of its own over the same memory
        lambda x: x[1:].sin(),
        lambda x: x.detach().sin() + x,
        lambda x: x.expand(2, 4, 6).sin(),
    ],
)
def test_others_stay(function: Callable[..., Any]) -> None:
    assert not _pass(function, X)[0]


def test_a_view_under_no_grad_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.view(4, 6)
        return y.sin() + x

    assert not _pass(function, X)[0]


def test_the_argument_itself_goes_even_where_it_is_written() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y.add_(1)
        return x * y

    changed, after = _pass(function, torch.randn(4, 6))
    assert changed
    assert after == ".add_(x, 1); mul(x, x); return (mul,)"


def test_a_view_that_is_written_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 6)
        y.add_(1)
        return x * y

    assert not _pass(function, torch.randn(4, 6))[0]


def test_compiled_results_share_memory_as_in_eager(compile_strictly: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.float(), x.view(4, 6), x.contiguous().sin()

    x = torch.randn(4, 6)
    same, view, _ = compile_strictly(function)(x)
    assert same is x
    assert view is not x
    view.zero_()
    assert not x.any()
