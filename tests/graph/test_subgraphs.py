"""Copies of graph modules keep what others read off the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchkiln.compiler import compile_fx, compile_fx_inner
from torchkiln.graph.subgraphs import copy_graph_module


def test_a_copy_says_which_variables_its_inputs_are() -> None:
    found: list[torch.fx.GraphModule] = []

    def backend(graph_module: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        found.append(graph_module)
        return graph_module.forward

    torch.compile(torch.nn.Linear(3, 2), backend=backend)(torch.randn(4, 3))
    (captured,) = found
    copy = copy_graph_module(captured)
    sources, copied = (
        [node._dynamo_source.name for node in module.graph.find_nodes(op="placeholder")] for module in (captured, copy)
    )
    assert len(sources) == 3
    assert copied == sources
    assert copy._param_name_to_source is captured._param_name_to_source


@pytest.mark.parametrize("trains", [False, True])
def test_compilers_are_told_which_inputs_stay_where_they_are(trains: bool) -> None:
    told: list[tuple[int, ...]] = []

    def inner(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **facts: Any) -> Any:
        told.append(tuple(facts.get("static_input_indices", ())))
        return compile_fx_inner(graph_module, inputs, **facts)

    def backend(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph_module, inputs, inner_compile=inner)

    model = torch.nn.Linear(3, 2).requires_grad_(trains)
    torch.compile(model, backend=backend)(torch.randn(4, 3))
    assert told == [(0, 1)]
