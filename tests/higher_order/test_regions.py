"""Regions that are compiled once and called many times."""

from __future__ import annotations

import pytest
import torch

import torchkiln
from tests.higher_order.against_eager import check, compiled

Tensor = torch.Tensor


@torch.compiler.nested_compile_region
def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ weight) + x


def _stack(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = _layer(x, weight)
    return x.sum(1)


@pytest.mark.parametrize("training", [False, True])
def test_a_region_called_several_times(training: bool) -> None:
    check(_stack, *(torch.randn(4, 4, dtype=torch.float64).requires_grad_(training) for _ in range(4)))


def test_a_region_is_compiled_once() -> None:
    before = torchkiln.stats()
    compiled(_stack)(*(torch.randn(32, 32) for _ in range(6)))
    after = torchkiln.stats()
    assert after.extern_calls["higher_order.call"] - before.extern_calls.get("higher_order.call", 0) == 5
    assert after.extern_calls["aten.mm.default"] - before.extern_calls.get("aten.mm.default", 0) == 1


def test_a_region_called_with_other_layouts() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return _layer(x, weight) + _layer(x.t(), weight.t())

    check(function, torch.randn(4, 4), torch.randn(4, 4))


def test_a_region_in_a_region() -> None:
    @torch.compiler.nested_compile_region
    def outer(x: Tensor, weight: Tensor) -> Tensor:
        return _layer(_layer(x, weight), weight).sin()

    check(lambda x, w: outer(x, w) + outer(x + 1, w), torch.randn(3, 3), torch.randn(3, 3))
