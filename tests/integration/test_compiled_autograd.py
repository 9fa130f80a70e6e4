"""Compiled autograd: the backward of everything as one captured graph, which takes saved tensors as a list."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import torchkiln

pytestmark = pytest.mark.usefixtures("everything_compiled")


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@torch._dynamo.config.patch(compiled_autograd=True)
def test_a_backward_inside_a_compiled_function() -> None:
    model = _network()
    eager = copy.deepcopy(model)

    @torch.compile(backend="kiln", options={"fallback": False})
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    counters["compiled_autograd"].clear()
    for rows in (3, 3, 5):  # gradients add up, and later sizes are symbolic
        x = torch.randn(rows, 4)
        expected = eager(x).square().sum()
        expected.backward()
        torch.testing.assert_close(step(x), expected)
        torch.testing.assert_close(_gradients(model), _gradients(eager))
    assert counters["compiled_autograd"]["captures"] > 0


@pytest.mark.parametrize("forward_is_compiled", [False, True])
def test_a_backward_that_is_one_graph_whatever_the_forward_was(forward_is_compiled: bool) -> None:
    model = _network()
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="kiln", options={"fallback": False}) if forward_is_compiled else model
    compiler = torch.compile(backend="kiln", fullgraph=True, options={"fallback": False})
    before = torchkiln.stats().graphs
    for _ in range(3):
        x = torch.randn(3, 4)
        loss = run(x).square().sum()
        with compiled_autograd._enable(compiler):
            loss.backward()
        eager(x).square().sum().backward()
        torch.testing.assert_close(_gradients(model), _gradients(eager))
    assert torchkiln.stats().graphs - before >= 1 + forward_is_compiled
