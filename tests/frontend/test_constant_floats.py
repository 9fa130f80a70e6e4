"""Floats that become constants: torch captures again without them before it traces, not after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torchkiln
import torchkiln.compiler
from torchkiln.compiler import trace_with_autograd


class WithFloat(nn.Module):
    """A module whose result depends on a float that it keeps."""

    def __init__(self, body: Callable[[Tensor, float], Tensor], number: float) -> None:
        super().__init__()
        self.number = number
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.number)


SETTLED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "norm": lambda x, number: F.layer_norm(x, (8,), eps=number),
    "hardtanh": lambda x, number: F.hardtanh(x, -number, number),
    "embedding": lambda x, number: F.embedding((x > 0).long(), x.detach()[:2], norm_type=number) + x.sum(),
    "norm and product": lambda x, number: F.layer_norm(x, (8,), eps=number) * number,
}
KEPT: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sum": lambda x, number: torch.rsqrt(x.square() + number),
    "product": lambda x, number: x * number,
    "quotient": lambda x, number: x / number,
}
UNKNOWN: dict[str, Callable[[Tensor, float], Tensor]] = {
    "norm and activation": lambda x, number: F.leaky_relu(F.layer_norm(x, (8,)), number),
}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, everything_compiled: None) -> Iterator[list[Any]]:
    """Grows by one for each graph that AOTAutograd begins to trace."""
    begun: list[Any] = []

    def counted(graph_module: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        begun.append(graph_module)
        return trace_with_autograd(graph_module, *args, **kwargs)

    monkeypatch.setattr(torchkiln.compiler, "trace_with_autograd", counted)
    with torchkiln.settings(fallback=False):
        yield begun


def steps(body: Callable[[Tensor, float], Tensor], *, train: bool) -> int:
    """Compare two floats and two sizes with eager; returns how many graphs were captured for them."""
    module = WithFloat(body, 0.5)
    counter = CompileCounterWithBackend("kiln")  # counts captures
    compiled = torch.compile(module, backend=counter, dynamic=True)
    for number in (0.5, 0.25):
        module.number = number
        for rows in (4, 6):
            x = torch.randn(rows, 8, requires_grad=train)
            again = x.detach().clone().requires_grad_(train)
            got, expected = compiled(x), module(again)
            torch.testing.assert_close(got, expected)
            if train:
                got.sum().backward()
                expected.sum().backward()
                torch.testing.assert_close(x.grad, again.grad)
    return counter.frame_count


@pytest.mark.usefixtures("no_cache")  # traces are counted
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", SETTLED)
def test_a_graph_with_a_float_that_becomes_a_constant_is_traced_once_for_each_value(
    name: str, train: bool, traces: list[Any]
) -> None:
    steps(SETTLED[name], train=train)
    assert len(traces) == 2


@pytest.mark.usefixtures("no_cache")  # traces are counted
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", KEPT)
def test_a_float_that_tensors_are_computed_with_stays_an_input(name: str, train: bool, traces: list[Any]) -> None:
    assert steps(KEPT[name], train=train) == 1
    assert len(traces) == 1


@pytest.mark.usefixtures("no_cache")  # traces are counted
def test_floats_that_equal_each_other_are_not_constant_by_that(traces: list[Any]) -> None:
    def function(x: Tensor, a: float, b: float) -> Tensor:
        return x * a + x * b if a == b else x

    compiled = torch.compile(function, backend="kiln", dynamic=True)
    x = torch.randn(4, 8)
    for number in (0.5, 0.25, 0.75):
        torch.testing.assert_close(compiled(x, number, number), function(x, number, number))
    assert len(traces) == 1


@pytest.mark.usefixtures("no_cache")  # traces are counted
@pytest.mark.parametrize("name", [*SETTLED, *KEPT, *UNKNOWN])
def test_graphs_are_those_that_torch_ends_with_where_it_finds_out_itself(
    name: str, traces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (SETTLED | KEPT | UNKNOWN)[name]
    captured = steps(body, train=True)
    graphs = [str(graph.graph) for graph in traces]
    traces.clear()
    torch._dynamo.reset()
    monkeypatch.setattr(torchkiln.compiler, "capture_without_constant_floats", lambda graph_module: None)
    assert steps(body, train=True) == captured
    as_torch_has_it = [str(graph.graph) for graph in traces]
    if name in SETTLED:
        del as_torch_has_it[0]  # which was given up at its end; torch knows the float for the second value
    assert graphs == as_torch_has_it
