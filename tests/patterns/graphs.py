"""Small graphs for the tests of the matcher, and what a pattern finds in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.patterns import Call, Outputs
from torchkiln.patterns.index import GraphIndex, Through
from torchkiln.patterns.matching import Pattern
from torchkiln.patterns.search import Found, Mismatch


def graph_of(function: Callable[..., Any], *inputs: Any, sizes: str = "fake") -> torch.fx.GraphModule:
    """``function`` as a graph of ATen calls with fake values; ``sizes="symbolic"`` leaves its sizes open.

    Calls that write to their arguments stay as they are.
    """
    return make_fx(function, tracing_mode=sizes)(*inputs)


def places(top: Call | Outputs, graph_module: torch.fx.GraphModule, *, through: Through | None = None) -> list[Found]:
    """Every place where the pattern lies, in order."""
    pattern, index = Pattern(top, through=through), GraphIndex(graph_module.graph)
    found = (pattern.match(index, node) for node in pattern.candidates(index))
    return [place for place in found if place is not None]


def only_place(top: Call | Outputs, graph_module: torch.fx.GraphModule, *, through: Through | None = None) -> Found:
    (place,) = places(top, graph_module, through=through)
    return place


def reason(top: Call | Outputs, graph_module: torch.fx.GraphModule, at: str) -> str:
    """Why the pattern does not lie at the node of that name."""
    index = GraphIndex(graph_module.graph)
    node = next(node for node in graph_module.graph.nodes if node.name == at)
    mismatch: list[Mismatch] = []
    assert Pattern(top).match(index, node, mismatch=mismatch) is None
    return mismatch[0].reason


def calls(graph_module: torch.fx.GraphModule) -> list[str]:
    """The operators the graph calls, in order."""
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def same_numbers(graph_module: torch.fx.GraphModule, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """The graph computes what ``function`` does, with the strides that has, and its fake values say so."""
    expected = function(*(value.clone() for value in inputs))
    got = torch.fx.Interpreter(graph_module).run(*(value.clone() for value in inputs))
    torch.testing.assert_close(got, expected, check_stride=True)
