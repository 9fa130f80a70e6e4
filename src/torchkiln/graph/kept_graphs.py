"""A copy of a graph to compile later, without the fake values of its nodes.

Their mode holds weak references to the tensors that it was told of, the weights among them, and torch swaps no tensors
that have such (``torch.utils.swap_tensors``). The values are made again from those of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchkiln.graph.fake import is_symbolic, update_fake_values, value_key
from torchkiln.graph.subgraphs import copy_graph_module, subgraphs

_FAKE_VALUES = frozenset({"val", "example_value", "eager_input_vals"})
"""The entries in the meta of nodes where torch keeps them."""


@dataclass(frozen=True)
class _Layout:
    """What a fake tensor is made from."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fake(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class KeptGraph:
    """Made by :func:`keep_graph`; each call gives a copy of the graph, with fake values of a mode of its own."""

    def __init__(self, graph_module: torch.fx.GraphModule, inputs: Sequence[_Layout | Any]) -> None:
        self._graph_module, self._inputs = graph_module, inputs

    def __call__(self) -> torch.fx.GraphModule:
        made, key = copy_graph_module(self._graph_module), "val"
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            for node, given in zip(made.graph.find_nodes(op="placeholder"), self._inputs, strict=True):
                node.meta[key] = given.fake() if isinstance(given, _Layout) else given
        update_fake_values(made)
        return made


def keep_graph(graph_module: torch.fx.GraphModule) -> KeptGraph | None:
    """None where fake values of the inputs do not tell those of all nodes: with symbolic sizes, or graphs inside."""
    key = value_key(graph_module.graph)
    if key != "val" or len(subgraphs(graph_module)) > 1:
        return None
    inputs: list[Any] = []
    for node in graph_module.graph.nodes:
        value = node.meta.get(key)
        if is_symbolic(value) or node.meta.get("unbacked_bindings"):
            return None
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor):
                if type(value) is not FakeTensor or value.layout is not torch.strided:
                    return None
                value = _Layout(tuple(value.shape), value.stride(), value.dtype, value.device)
            inputs.append(value)
    kept = copy_graph_module(graph_module)
    for node in kept.graph.nodes:
        node.meta = {name: value for name, value in node.meta.items() if name not in _FAKE_VALUES}
    return KeptGraph(kept, inputs)
