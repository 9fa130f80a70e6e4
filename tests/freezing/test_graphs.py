"""A functional graph is frozen: its weights become attributes, and what depends on them alone is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.errors import DiscardedError, OptionError

_aten = torch.ops.aten


def _model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    model[1].running_mean.normal_()  # type: ignore[union-attr, operator]
    return model.eval()


def _functional(model: nn.Module, image: torch.Tensor) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A graph of parameters, buffers and the image, and its inputs."""
    names = [*(name for name, _ in model.named_parameters()), *(name for name, _ in model.named_buffers())]
    tensors = [*model.parameters(), *model.buffers()]

    def function(*inputs: torch.Tensor) -> Any:
        return (torch.func.functional_call(model, dict(zip(names, inputs, strict=False)), (inputs[-1],)),)

    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*tensors, image), [*tensors, image]


def test_weights_become_attributes_and_other_inputs_stay() -> None:
    model, image = _model(), torch.randn(2, 3, 8, 8)
    graph, inputs = _functional(model, image)
    before = str(graph.graph)
    with torch.no_grad():
        frozen, stayed = torchkiln.freeze(model, graph, inputs)  # type: ignore[arg-type]
        assert stayed == [len(inputs) - 1]
        torch.testing.assert_close(frozen(image)[0], model(image))
    assert str(graph.graph) == before
    assert len(frozen.graph.find_nodes(op="placeholder")) == 1
    targets = {node.target for node in frozen.graph.nodes if node.op == "call_function"}
    assert _aten._native_batch_norm_legit_no_training.default not in targets
    assert _aten.rsqrt.default not in targets
    assert set(dict(frozen.named_buffers())) == {node.target for node in frozen.graph.find_nodes(op="get_attr")}


def test_a_backend_may_freeze_what_aot_autograd_hands_it() -> None:
    model, image = _model(), torch.randn(2, 3, 8, 8)
    values: list[Any] = []
    graphs: list[tuple[torch.fx.GraphModule, list[int]]] = []

    def backend(captured: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        values[:] = example_inputs

        def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            frozen, stayed = torchkiln.freeze(captured, graph, values)
            graphs.append((frozen, stayed))

            def call(arguments: list[Any]) -> Any:
                return frozen(*(arguments[position] for position in stayed))

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return aot_autograd(fw_compiler=compiler, inference_compiler=compiler)(captured, example_inputs)

    with torch.no_grad():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(image), model(image))
    ((frozen, stayed),) = graphs
    assert len(stayed) == 1
    assert len(frozen.graph.find_nodes(op="placeholder")) == 1


def test_the_captured_graph_loses_its_weights_where_that_is_asked_for() -> None:
    model, image = _model(), torch.randn(2, 3, 8, 8)
    graph, inputs = _functional(model, image)
    with torch.no_grad():
        expected = model(image)
        frozen, _ = torchkiln.freeze(model, graph, inputs, discard_parameters=True)  # type: ignore[arg-type]
        with pytest.raises(DiscardedError, match="discarded its weights"):
            model(image)
        torch.testing.assert_close(frozen(image)[0], expected)


def test_a_buffer_that_the_graph_writes_to_stays_an_input() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.exp() + self.count

    model, x = Counts(), torch.randn(4)

    def function(weight: torch.Tensor, count: torch.Tensor, x: torch.Tensor) -> Any:
        result = torch.func.functional_call(model, {"weight": weight, "count": count}, (x,))
        count.add_(1)
        return (result,)

    with torch.no_grad():
        graph = make_fx(torch.func.functionalize(function), tracing_mode="fake")(model.weight, model.count, x)
        frozen, stayed = torchkiln.freeze(model, graph, [model.weight, model.count, x])  # type: ignore[arg-type]
        assert stayed == [1, 2]
        count = torch.ones(4)
        torch.testing.assert_close(frozen(count, x)[0], x * model.weight.exp() + 1)
        assert torch.equal(count, torch.full((4,), 2.0))


def test_training_is_refused_and_so_are_weights_without_values() -> None:
    model, image = _model(), torch.randn(2, 3, 8, 8)
    graph, inputs = _functional(model, image)
    with pytest.raises(OptionError, match="would record gradients"):
        torchkiln.freeze(model, graph, inputs)  # type: ignore[arg-type]
    fakes: list[Any] = [FakeTensorMode().from_tensor(value) for value in inputs]
    with torch.no_grad(), pytest.raises(OptionError, match="needs the values of weights, and input 0"):
        torchkiln.freeze(model, graph, [nn.Parameter(fakes[0]), *inputs[1:]])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes no inputs"):
        torchkiln.freeze(model, None, inputs)  # type: ignore[call-overload]
