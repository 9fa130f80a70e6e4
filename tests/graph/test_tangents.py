"""Tangents are known by what AOTAutograd says of inputs, whatever the inputs are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor

import torchkiln.compiler as compiler
from torchkiln.graph.tangents import after_tangents, is_tangent, mark_tangent
from torchkiln.patterns.tracing import joint_fwd_bwd


def _partitioned(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *inputs: Tensor
) -> list[torch.fx.GraphModule]:
    """The joint graph of ``function`` as the partition is given it, and its forward and backward."""
    seen: list[torch.fx.GraphModule] = []
    partition = compiler.min_cut_rematerialization_partition

    def kept(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.append(joint)
        seen.extend(partition(joint, *args, **kwargs))
        return seen[-2:]

    monkeypatch.setattr(compiler, "min_cut_rematerialization_partition", kept)
    results = torch.compile(function, backend="kiln", options={"fallback": False})(*inputs)
    flat = [result for result in (results if isinstance(results, tuple) else (results,)) if result.requires_grad]
    torch.autograd.backward(flat, [torch.ones_like(result) for result in flat])
    return seen


def _tangents(graph: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in graph.graph.find_nodes(op="placeholder") if is_tangent(node)]


@pytest.mark.usefixtures("no_cache")  # a stage is watched
def test_each_result_with_a_gradient_has_a_tangent_in_the_joint_graph_and_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(tangents_of_mine: Tensor, x: Tensor) -> Sequence[Tensor]:
        return (tangents_of_mine * x).exp(), (x > 0).sum(), x.sin()

    inputs = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    joint, forward, backward = _partitioned(monkeypatch, function, *inputs)
    assert len(_tangents(joint)) == 2
    assert _tangents(forward) == []
    assert _tangents(backward) == _tangents(joint)
    placeholders = [node.name for node in backward.graph.find_nodes(op="placeholder")]
    assert placeholders[-2:] == _tangents(backward)


def test_an_input_called_tangents_is_none() -> None:
    graph = torch.fx.Graph()
    named, other = graph.placeholder("tangents_1"), graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (named, other))
    assert after_tangents(graph) == set()
    mark_tangent(other, 0)
    assert after_tangents(graph) == {other, product}


def test_traced_rewrites_know_their_tangents() -> None:
    traced = joint_fwd_bwd(lambda x, y: (x * y).sin(), ["x", "y"], [torch.ones(3, requires_grad=True), torch.ones(3)])
    graph = traced.graph_module.graph
    assert [is_tangent(node) for node in graph.find_nodes(op="placeholder")] == [False, False, True]
    forward, *gradients = graph.output_node().args[0]
    late = after_tangents(graph)
    assert forward not in late
    assert gradients[0] in late
