"""Symbolic numbers become nodes that compute them, from whatever tells their symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.graph.symbolic import symbolic_tensor
from torchkiln.errors import UnsupportedError
from torchkiln.graph.fake import same_strides
from torchkiln.graph.size_nodes import SizeNodes
from torchkiln.graph.strides import restrided
from torchkiln.graph.tangents import mark_tangent

aten = torch.ops.aten


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def _graph(*values: Any) -> tuple[torch.fx.Graph, list[torch.fx.Node]]:
    """A graph of placeholders that have these fake values."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    return graph, nodes


def _run(graph: torch.fx.Graph, result: Any, *inputs: Any) -> Any:
    graph.output(result)
    graph.lint()
    return torch.fx.GraphModule({}, graph)(*inputs)


def test_a_number_is_computed_from_the_sizes_of_inputs(mode: FakeTensorMode) -> None:
    x = symbolic_tensor(mode, "x", 6, 10)
    graph, (node,) = _graph(x)
    numbers = SizeNodes(node)
    wanted = [8 * x.shape[0] * (x.shape[1] - 2) // 3 + 5, torch.sym_max(x.shape[0] % 4, 3), x.shape[1] ** 2, 7]
    found = [numbers.argument(number) for number in wanted]
    assert [made.meta["val"].node.expr for made in found[:3]] == [number.node.expr for number in wanted[:3]]
    assert not mode.shape_env.guards
    assert _run(graph, found, torch.empty(9, 11)) == [8 * 9 * 9 // 3 + 5, 3, 121, 7]


def test_a_number_that_is_an_input_is_preferred_to_the_size_of_a_tensor(mode: FakeTensorMode) -> None:
    x = symbolic_tensor(mode, "x", 6)
    graph, (tensor, number) = _graph(x, x.shape[0])
    assert SizeNodes(tensor).argument(x.shape[0]) is number
    assert len(graph.nodes) == 2


def test_a_number_is_made_of_strides_of_inputs_and_of_sizes_on_the_way(mode: FakeTensorMode) -> None:
    hidden, x = symbolic_tensor(mode, "hidden", 6), symbolic_tensor(mode, "x", 10)
    with mode:
        strided = torch.empty_strided((3, 3), (hidden.shape[0], 1))
    graph, (node,) = _graph(strided)
    assert _run(graph, SizeNodes(node).argument(2 * hidden.shape[0]), torch.empty(3, 7)[:, :3]) == 14
    graph, (node,) = _graph(None)
    between = graph.call_function(aten.sin.default, (node,))
    between.meta["val"] = x
    assert _run(graph, SizeNodes(between).argument(2 * x.shape[0]), torch.empty(5)) == 10


def test_a_number_that_nothing_tells_is_refused(mode: FakeTensorMode) -> None:
    x, hidden = symbolic_tensor(mode, "x", 6), symbolic_tensor(mode, "hidden", 10)
    _, (node,) = _graph(x)
    with pytest.raises(UnsupportedError, match="which nothing before x0 tells"):
        SizeNodes(node).argument(hidden.shape[0] + 1)


def test_tangents_tell_a_number_only_to_their_readers(mode: FakeTensorMode) -> None:
    x, tangent = torch.empty(3), symbolic_tensor(mode, "tangent", 10)
    graph = torch.fx.Graph()
    primal, given = graph.placeholder("primal"), graph.placeholder("given")
    mark_tangent(given, 0)
    primal.meta["val"], given.meta["val"] = x, tangent
    with pytest.raises(UnsupportedError):
        SizeNodes(primal).argument(tangent.shape[0])
    assert SizeNodes(given).argument(tangent.shape[0]).args == (given, 0)


@pytest.mark.parametrize("layout", ["a part of rows", "every other row", "transposed parts", "overlapping rows"])
def test_copies_of_symbolic_sizes_have_the_strides_asked_for(layout: str, mode: FakeTensorMode) -> None:
    def laid_out(x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        strides = {
            "a part of rows": (columns + 3, 1),
            "every other row": (2 * columns, 1),
            "transposed parts": (1, 3 * rows),
            "overlapping rows": (1, 1),
        }
        return torch.empty_strided(x.shape, strides[layout])

    value = symbolic_tensor(mode, "x", 6, 10)
    graph, (node,) = _graph(value)
    with mode:
        like = laid_out(value)
    copy = restrided(graph, node, like)[-1]
    assert same_strides(copy.meta["val"], like)
    assert not mode.shape_env.guards
    x = torch.arange(7.0)[:, None] + torch.arange(11.0)  # equal where rows overlap
    result = _run(graph, copy, x)
    assert result.stride() == laid_out(x).stride()
    assert torch.equal(result, x)
