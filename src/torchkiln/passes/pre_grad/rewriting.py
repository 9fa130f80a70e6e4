"""Rewriting captured graphs: what a pass asks of the graph, the loop over its calls, and new calls in place of old."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx

from torchkiln.graph.captured_calls import add_call, tensor_of, value_of
from torchkiln.graph.captured_memory import Memory
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.insertion import erase_made
from torchkiln.graph.nodes import replace, rewrite_each


class CapturedGraph:
    """A captured graph and what is known of its memory when a pass begins."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._module = graph_module
        self.memory = Memory(graph_module)

    def value(self, node: torch.fx.Node) -> Any:
        """The fake value of ``node``; None when it has none."""
        return value_of(self._module, node)

    def tensor(self, node: Any) -> torch.Tensor | None:
        """The fake value of ``node`` where that is one strided tensor."""
        return tensor_of(self._module, node)

    def alike(self, left: torch.fx.Node, right: torch.fx.Node) -> bool:
        """Whether two values are known and look the same to a reader."""
        one, other = self.value(left), self.value(right)
        return one is not None and other is not None and same_metadata(one, other)

    def have_one_type(self, nodes: Collection[torch.fx.Node]) -> bool:
        """Whether all ``nodes`` are tensors of one dtype and rank: cat takes empty vectors among tensors of any."""
        tensors = [self.tensor(node) for node in nodes]
        kinds = {None if tensor is None else (tensor.dtype, tensor.dim()) for tensor in tensors}
        return None not in kinds and len(kinds) == 1


def rewrite_calls(
    graph_module: torch.fx.GraphModule,
    targets: Collection[Any],
    rewrite: Callable[[CapturedGraph, torch.fx.Node], bool],
) -> bool:
    """Call ``rewrite`` on every call of ``targets``, functions or names of methods; returns whether one changed.

    Not where the graph resizes a tensor: the fake values of earlier nodes show its later sizes.
    """
    calls = [n for n in graph_module.graph.nodes if n.op in ("call_function", "call_method") and n.target in targets]
    if not calls:
        return False
    graph = CapturedGraph(graph_module)
    return graph.memory.steady and rewrite_each(calls, partial(rewrite, graph))


class Replacement:
    """Calls made right before the node ``place``. In the end they take the place of others or are erased."""

    def __init__(self, graph: CapturedGraph, place: torch.fx.Node) -> None:
        self._graph = graph
        self._place = place
        self._calls: list[torch.fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        self._calls.append(add_call(self._place, target, args, kwargs))
        return self._calls[-1]

    def take_place(self, old: Sequence[torch.fx.Node], new: Sequence[torch.fx.Node]) -> bool:
        """Replace each of ``old`` by one of ``new``; False where sizes, strides or types would change."""
        if not all(map(self._graph.alike, old, new)):
            erase_made(self._calls)
            return False
        for node in self._calls:
            self._graph.memory.stands_for(node, self._place)
        for left, right in zip(old, new, strict=True):
            replace(left, right)
        return True
