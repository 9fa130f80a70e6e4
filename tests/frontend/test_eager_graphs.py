"""Graphs that could not be compiled: their results lie in memory as those of compiled ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchkiln.compiler
from torchkiln.errors import FallbackWarning, UnsupportedError
from torchkiln.frontend.eager_graphs import with_native_results

pytestmark = pytest.mark.filterwarnings("ignore::torchkiln.errors.FallbackWarning")


@pytest.fixture
def run_eagerly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``torch.compile`` with a compiler that compiles nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedError("everything")

    monkeypatch.setattr(torchkiln.compiler, "lower", refuse)
    return lambda function: torch.compile(function, backend="kiln", options={"adaptive": False})


def test_gradients_add_up_over_steps(run_eagerly: Callable[..., Any]) -> None:
    compiled = run_eagerly(lambda x, y: (x + y.view(4, 6)).sin())
    x, y = torch.zeros(4, 6, requires_grad=True), torch.zeros(24, requires_grad=True)
    for step in range(3):
        (compiled(x, y) * 3).sum().backward()
        for leaf in (x, y):
            torch.testing.assert_close(leaf.grad, torch.full_like(leaf, 3.0 * (step + 1)))


def test_a_result_written_before_backward_is_noticed(run_eagerly: Callable[..., Any]) -> None:
    compiled = run_eagerly(lambda x: torch.exp(x)[1:].view(-1))
    x = torch.randn(4, 6, requires_grad=True)
    for _ in range(3):
        result = compiled(x).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
        compiled(x).sum().backward()


@pytest.mark.usefixtures("no_cache")  # the stages are made to fail
def test_the_fallback_is_told_of(run_eagerly: Callable[..., Any]) -> None:
    with pytest.warns(FallbackWarning, match="everything"):
        run_eagerly(torch.sin)(torch.randn(3))


def test_only_gradients_that_share_memory_are_copied() -> None:
    saved, tangent = torch.randn(4, 6), torch.randn(4, 6)
    made = torch.randn(4, 6)
    gradients = tangent, tangent, made, made, made.view(24), saved[1:], None
    backward = with_native_results(lambda *_: gradients, "backward")
    results = backward(saved, tangent)
    assert [r is t for r, t in zip(results[:4], (tangent, tangent, made, made), strict=True)] == [True] * 4
    assert results[6] is None
    for copy, original in ((results[4], made.view(24)), (results[5], saved[1:])):
        assert torch.equal(copy, original)
        assert copy.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


def test_results_of_a_forward_are_plain_tensors_that_share_the_version_of_their_memory() -> None:
    def function(x: Tensor) -> list[Tensor]:
        made = x.exp()
        return [torch.ops.aten._unsafe_view(made, [24]), made.t(), made]

    results = with_native_results(function, "forward")(torch.randn(4, 6))
    assert not any(result._is_view() for result in results)
    results[0].add_(1)
    assert [result._version for result in results] == [1, 1, 1]
    torch.testing.assert_close(results[1], results[0].view(4, 6).t())
