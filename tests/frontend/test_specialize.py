"""Graphs with symbolic sizes, specialized for the sizes of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.errors import NodeFailure
from torchkiln.frontend import copies_by_key
from torchkiln.frontend.specialize import SpecializedGraphs, has_symbolic_inputs, specialize
from torchkiln.graph.fake import is_symbolic


def _function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (x.view(-1).repeat(2)[: y.shape[0] * 2] * x.shape[0]).sum() + y.mean(), x.shape[0] * y.shape[0]


def _traced(*inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(_function, tracing_mode="symbolic")(*inputs)


X, Y = torch.randn(5, 4), torch.randn(7)


def test_a_specialized_graph_has_no_symbols_and_computes_the_same() -> None:
    symbolic = _traced(torch.randn(3, 4), torch.randn(6))
    assert has_symbolic_inputs(symbolic)
    fixed = specialize(symbolic, (X, Y))
    assert not has_symbolic_inputs(fixed)
    for node in fixed.graph.nodes:
        assert not is_symbolic(node.meta.get("val"))
        if node.op == "call_function":
            assert "sym_size" not in str(node.target)
    torch.testing.assert_close(fixed(X, Y), _function(X, Y))


def test_inputs_that_are_numbers_stay_as_inputs_nobody_reads() -> None:
    graph = torch.fx.Graph()
    size, x = graph.placeholder("size"), graph.placeholder("x")
    doubled = graph.call_function(lambda n: n * 2, (size,))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, doubled)), size))
    symbolic = torch.fx.GraphModule({}, graph)
    fixed = specialize(symbolic, (3, X))
    first = fixed.graph.find_nodes(op="placeholder")[0]
    assert (first.name, list(first.users)) == ("size", [fixed.graph.output_node()])
    product, returned = fixed(3, X)
    torch.testing.assert_close(product, X * 6)
    assert returned == 3


def _counting() -> tuple[list[torch.fx.GraphModule], Callable[[torch.fx.GraphModule], Callable[[list[Any]], Any]]]:
    made: list[torch.fx.GraphModule] = []

    def compile_for(symbolic: torch.fx.GraphModule, arguments: Sequence[Any]) -> Callable[[list[Any]], Any]:
        gm = specialize(symbolic, arguments)
        made.append(gm)
        return lambda arguments: gm(*arguments)

    return made, compile_for


def test_one_copy_per_combination_of_sizes_and_strides() -> None:
    made, compile_for = _counting()
    graphs = SpecializedGraphs(_traced(torch.randn(3, 4), torch.randn(6)), compile_for)
    for x, y in ((X, Y), (X + 1, Y), (X[:3], Y), (X, Y[:2]), (X, Y)):
        torch.testing.assert_close(graphs([x, y]), _function(x, y))
    assert len(made) == 3


def test_the_copies_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_by_key, "_MOST_COPIES", 2)
    made, compile_for = _counting()
    graphs = SpecializedGraphs(_traced(torch.randn(3, 4), torch.randn(6)), compile_for)
    for rows in (3, 4, 3, 5, 3, 4):  # 4 is dropped for 5, so the last call compiles again
        graphs([torch.randn(rows, 4), Y])
    assert len(made) == 4


def test_threads_compile_each_combination_once() -> None:
    made, compile_for = _counting()
    graphs = SpecializedGraphs(_traced(torch.randn(3, 4), torch.randn(6)), compile_for)
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for rows in (3, 4, 5):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(graphs([x, Y]), _function(x, Y))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(made) == 3


def test_sizes_that_do_not_fit_name_the_node() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.view.default, (x, [7])),))
    with pytest.raises(NodeFailure, match="view"):
        specialize(torch.fx.GraphModule({}, graph), (X,))
