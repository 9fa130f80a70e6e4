"""An inference graph in two computes what it computed whole, and keeps no more than what is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.graph.aliases import view_source
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.graph.weights import is_weight, mark_weights, weight_values
from torchkiln.partition.hoisting import Hoisted, hoist

aten = torch.ops.aten
SIZE = 4
UNARY = (aten.sin.default, aten.relu.default, aten.clone.default, aten.t.default, aten.neg.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.mm.default, aten.sub.Tensor)


def _traced(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], weights: Sequence[int]
) -> torch.fx.GraphModule:
    """The graph of ``function`` with the inputs at these positions marked as weights."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value, static_shapes=True) for value in inputs]
    with mode:
        module = make_fx(function)(*fakes)
    mark_weights(module.graph, weights)
    return module


def _divided(module: torch.fx.GraphModule) -> Hoisted:
    found = hoist(module)
    assert found is not None
    found.rest.recompile()
    found.rest.graph.lint()
    found.weights.graph.lint()
    return found


def _run(hoisted: Hoisted, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    prepared = hoisted.weights(*(inputs[position] for position in hoisted.taken))
    return list(hoisted.rest(*inputs, *prepared))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[torch.fx.GraphModule, int]:
    """A graph of square matrices and how many of its first inputs are weights."""
    mode, graph = FakeTensorMode(), torch.fx.Graph()
    weights, others = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    values = []
    for k in range(weights + others):
        values.append(graph.placeholder(f"input_{k}"))
        with mode:
            values[-1].meta["val"] = torch.empty(SIZE, SIZE)
    for _ in range(draw(st.integers(1, 12))):
        target = draw(st.sampled_from((*UNARY, *BINARY)))
        count = 2 if target in BINARY else 1
        operands = tuple(values[-1 - draw(st.integers(0, len(values) - 1))] for _ in range(count))
        values.append(graph.call_function(target, operands))
        with mode:
            values[-1].meta["val"] = target(*(node.meta["val"] for node in operands))
    results = [values[-1], *(node for node in values if draw(st.booleans()))]
    graph.output(tuple(results))
    mark_weights(graph, range(weights))
    return torch.fx.GraphModule(nn.Module(), graph), weights


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_the_two_graphs_compute_what_the_whole_one_did(drawn: tuple[torch.fx.GraphModule, int]) -> None:
    module, _ = drawn
    inputs = [torch.randn(SIZE, SIZE) for _ in module.graph.find_nodes(op="placeholder")]
    expected = copy_graph_module(module)(*inputs)
    hoisted = hoist(module)
    if hoisted is None:
        module.recompile()
        found: Sequence[torch.Tensor] = module(*inputs)
    else:
        hoisted.rest.recompile()
        found = _run(hoisted, inputs)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_nothing_that_depends_on_weights_alone_is_left_but_views_and_results(
    drawn: tuple[torch.fx.GraphModule, int],
) -> None:
    module, _ = drawn
    hoist(module)
    graph = module.graph
    given_back = set(graph.output_node().all_input_nodes)
    eliminate_dead_code(graph, has_effect)
    for node in weight_values(graph):
        assert is_weight(node) or view_source(node) is not None or _leads_to(node, given_back)


def _leads_to(node: torch.fx.Node, results: set[torch.fx.Node]) -> bool:
    """Whether ``node`` is a result, or shares memory with one."""
    return node in results or any(view_source(user) is node and _leads_to(user, results) for user in node.users)


def test_a_value_that_is_returned_is_the_callers_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> Any:
            doubled = self.weight * 2
            return x @ doubled, doubled, doubled.t()

    model, x = Model(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="kiln", fullgraph=True)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            found = compiled(x)
            for left, right in zip(found, expected, strict=True):
                torch.testing.assert_close(left, right)
            found[1].zero_()


def test_a_small_weight_does_not_become_a_large_value() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (weight.exp().repeat(100, 100) + x,)

    inputs = [torch.randn(8, 8), torch.randn(800, 800)]
    hoisted = _divided(_traced(function, inputs, [0]))
    (prepared,) = hoisted.weights(inputs[0])
    assert prepared.shape == (8, 8)
    assert torch.equal(_run(hoisted, inputs)[0], function(*inputs)[0])


def test_a_value_as_large_as_all_the_weights_it_is_made_of_is_kept() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ torch.cat([a, b], 1),)

    inputs = [torch.randn(256, 256), torch.randn(256, 256), torch.randn(2, 256)]
    hoisted = _divided(_traced(function, inputs, [0, 1]))
    (prepared,) = hoisted.weights(*inputs[:2])
    assert prepared.shape == (256, 512)


def test_views_of_weights_stay_views() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ weight.t()[1:],)

    assert hoist(_traced(function, [torch.randn(4, 4), torch.randn(2, 3)], [0])) is None


def test_values_made_of_numbers_alone_stay() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + torch.arange(4.0).exp() + weight.exp(),)

    inputs = [torch.randn(4), torch.randn(4)]
    hoisted = _divided(_traced(function, inputs, [0]))
    assert aten.arange.default in {node.target for node in hoisted.rest.graph.nodes}
    assert torch.equal(_run(hoisted, inputs)[0], function(*inputs)[0])


def test_random_numbers_are_drawn_at_each_call() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + torch.bernoulli(weight.sigmoid()),)

    hoisted = _divided(_traced(function, [torch.randn(4), torch.randn(4)], [0]))
    assert any("bernoulli" in str(node.target) for node in hoisted.rest.graph.nodes)
    assert not any("bernoulli" in str(node.target) for node in hoisted.weights.graph.nodes)


def test_a_value_that_two_nodes_compute_is_kept_once() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = x.bfloat16()
        return (x @ weight.to(torch.bfloat16) @ weight.to(torch.bfloat16),)

    hoisted = _divided(_traced(function, [torch.randn(4, 4), torch.randn(2, 4)], [0]))
    assert len(hoisted.weights.graph.output_node().args[0]) == 1  # type: ignore[arg-type]


def test_a_weight_that_the_graph_writes_to_is_none() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
        made = x * weight.exp()
        weight.copy_(weight + 1)
        return (made,)

    module = _traced(function, [torch.randn(4), torch.randn(4)], [0])
    assert not any(map(is_weight, module.graph.nodes))
    assert hoist(module) is None


def test_other_inputs_may_have_symbolic_sizes() -> None:
    model = nn.Linear(6, 4)
    compiled = torch.compile(model, backend="kiln", dynamic=True, fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for rows in (3, 5, 9):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0.02)


def test_bodies_of_higher_order_operators_compute_what_they_did() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = self.weight * 3
            return torch.cond(x.sum() > 0, lambda y: y @ scaled, lambda y: y @ (scaled + self.weight), (x,))

    model = Model()
    compiled = torch.compile(model, backend="kiln", fullgraph=True)
    with torch.no_grad():
        for x in (torch.rand(3, 8), -torch.rand(3, 8)):
            torch.testing.assert_close(compiled(x), model(x))
            model.weight.mul_(0.5)
            torch.testing.assert_close(compiled(x), model(x))


def test_casts_of_autocast_run_when_a_weight_changes() -> None:
    torchkiln.reset_stats()
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(2, 16)
    compiled = torch.compile(model, backend="kiln", fullgraph=True, options={"adaptive": False})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0.02)
    kinds = [graph.kind for graph in torchkiln.stats().by_graph]
    assert sorted(kinds) == ["inference", "weights"]
    rest = next(graph for graph in torchkiln.stats().by_graph if graph.kind == "inference")
    assert rest.operations < 4 + 4  # two matmuls, a relu and casts of what is computed, none of the four weights


def test_two_views_of_one_memory_may_be_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(8, 4)
            self.register_buffer("first", both[:4])
            self.register_buffer("second", both[4:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.first.exp() + x @ self.second.exp()  # type: ignore[operator]

    model, x = Model(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="kiln", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        model.first.add_(1)  # type: ignore[operator]
        torch.testing.assert_close(compiled(x), model(x))
