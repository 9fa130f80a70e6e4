"""The nodes of a graph, indexed for matching, and the operators that a match may see through."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.fx

from torchkiln.graph.effects import writes
from torchkiln.graph.fake import same_metadata
from torchkiln.patterns.arguments import argument_form
from torchkiln.patterns.expressions import Call

Through = Literal["no_ops", "views", "layout"]

# Seen through where they change nothing; what they do otherwise shows in the sizes, strides and dtype of the result.
_MAYBE_NO_OPS = "view reshape _unsafe_view slice expand clone alias detach permute"
# Always seen through. views: the elements keep their order, only the sizes change. layout: what a matmul, a reshape or
# a cast to contiguous inserts to suit the strides of its input, and leaves out for others.
_ALWAYS: dict[Through | None, str] = {
    "views": "view reshape _unsafe_view squeeze unsqueeze",
    "layout": "view reshape _unsafe_view expand clone alias squeeze unsqueeze contiguous",
}


class GraphIndex:
    """The nodes of a graph by target, and their arguments in the order of the schema.

    Kept right while a graph is rewritten: nodes that were erased are left out, and :meth:`add` tells of new ones.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self._by_target: dict[Any, list[torch.fx.Node]] = {}
        self._arguments: dict[torch.fx.Node, tuple[Any, ...] | None] = {}
        self.author: str | None = None
        """The rewrite that makes the nodes added now."""
        self._authors: dict[torch.fx.Node, str] = {}
        self._sources: dict[tuple[torch.fx.Node, Through], torch.fx.Node | None] = {}
        self.traces: dict[object, Any] = {}
        """Traces at values found in this graph; they hold its fake tensors and go with it."""
        self.results: dict[Hashable, Hashable] = {}
        """What calls of operators gave, for ``propagate_strides``."""
        for node in graph.nodes:
            self.add(node)

    def add(self, node: torch.fx.Node) -> None:
        if self.author is not None:
            self._authors[node] = self.author
        if node.op in ("call_function", "call_method"):
            self._by_target.setdefault(node.target, []).append(node)

    def made_by(self, node: torch.fx.Node) -> str | None:
        """The rewrite that put ``node`` into the graph since the index was made."""
        return self._authors.get(node)

    def nodes(self, targets: Iterable[Any]) -> list[torch.fx.Node]:
        return [node for target in targets for node in self._by_target.get(target, ()) if not node._erased]

    def count(self, targets: Iterable[Any]) -> int:
        return sum(len(self._by_target.get(target, ())) for target in targets)

    def writers(self) -> list[torch.fx.Node]:
        """The calls that write to memory of their arguments."""
        return self.nodes(t for t in self._by_target if isinstance(t, torch._ops.OpOverload) and writes(t))

    def arguments(self, node: torch.fx.Node) -> tuple[Any, ...] | None:
        found = self._arguments.get(node, False)
        if found is False:
            found = self._arguments[node] = argument_form(node.target).arrange(node.args, node.kwargs)
        return found  # type: ignore[return-value]

    def forget(self, nodes: Iterable[torch.fx.Node]) -> None:
        """The arguments of these nodes have changed."""
        for node in nodes:
            self._arguments.pop(node, None)
        self.forget_values()

    def forget_values(self) -> None:
        """The sizes or strides of some nodes may have changed."""
        self._sources.clear()

    def seen_through(self, node: torch.fx.Node, through: Through | None) -> torch.fx.Node | None:
        """As the function of that name; every rewrite asks the same of the same nodes."""
        if through is None:
            return None
        key = (node, through)
        found = self._sources.get(key, False)
        if found is False:
            found = self._sources[key] = seen_through(node, through)
        return found  # type: ignore[return-value]

    def chain(self, node: torch.fx.Node, through: Through) -> Iterator[torch.fx.Node]:
        """``node``, the value it passes on, the value that passes on, and so on."""
        current: torch.fx.Node | None = node
        while current is not None:
            yield current
            current = self.seen_through(current, through)

    def walk_up(self, node: torch.fx.Node, steps: Sequence[Call], through: Through | None) -> list[torch.fx.Node]:
        """The nodes reached from ``node`` by a user for each of ``steps``, one after the other."""
        level = [node]
        for step in steps:
            above: dict[torch.fx.Node, None] = {}
            while level:
                for user in level.pop().users:
                    if user.target in step.targets:
                        above[user] = None
                    elif self.seen_through(user, through) is not None:
                        level.append(user)
            level = list(above)
        return level


def seen_through(node: torch.fx.Node, through: Through) -> torch.fx.Node | None:
    """The value ``node`` merely passes on, if it is one of the operators ``through`` names."""
    source = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(source, torch.fx.Node):
        return None
    always, sometimes = _seen_through_as(node.target, through)
    if always:
        return source
    if not sometimes:
        return None
    before, after = source.meta.get("val"), node.meta.get("val")
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return source if tensors and same_metadata(before, after) else None


@lru_cache(maxsize=4096)
def _seen_through_as(target: torch._ops.OpOverload, through: Through) -> tuple[bool, bool]:
    """Whether a target is always seen through, and whether it is where it changes nothing."""
    name = target._schema.name.removeprefix("aten::")
    return name in _ALWAYS.get(through, "").split(), name in _MAYBE_NO_OPS.split()


def outer_layouts(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """``node`` and everything that is another layout of it, nearest first."""
    pending = [node]
    for current in pending:
        yield current
        pending += (user for user in current.users if seen_through(user, "layout") is current)
