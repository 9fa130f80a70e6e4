"""Replacing calls by others, all or nothing: new calls that give something else than the old ones are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx

from torchkiln.graph.captured_calls import add_call, replace, value_of
from torchkiln.graph.captured_memory import Memory
from torchkiln.graph.fake import same_metadata


class Replacement:
    """Calls made right before the node ``place``, which take the place of others in the end or go again."""

    def __init__(self, graph_module: torch.fx.GraphModule, memory: Memory, place: torch.fx.Node) -> None:
        self._graph_module = graph_module
        self._memory = memory
        self._place = place
        self._calls: list[torch.fx.Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        self._calls.append(add_call(self._place, target, args, kwargs))
        return self._calls[-1]

    def take_place(self, old: Sequence[torch.fx.Node], new: Sequence[torch.fx.Node]) -> bool:
        """Let each of ``new`` stand for one of ``old``, which go; False where sizes, strides or types would change."""
        if not all(self._alike(left, right) for left, right in zip(old, new, strict=True)):
            return self.give_up()
        for node in self._calls:
            self._memory.stands_for(node, self._place)
        for left, right in zip(old, new, strict=True):
            replace(left, right)
        return True

    def _alike(self, left: torch.fx.Node, right: torch.fx.Node) -> bool:
        one, other = value_of(self._graph_module, left), value_of(self._graph_module, right)
        return one is not None and other is not None and same_metadata(one, other)

    def give_up(self) -> bool:
        """Take all calls back."""
        for node in reversed(self._calls):
            node.graph.erase_node(node)
        self._calls.clear()
        return False
