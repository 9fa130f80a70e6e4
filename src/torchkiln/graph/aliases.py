"""Which nodes of a functional graph share memory, by the schemas of the operators between them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.fx

from torchkiln.graph.effects import mutated_arguments
from torchkiln.graph.program_memory import NOTED, arguments_sharing_memory
from torchkiln.graph.tangents import is_tangent

_aten = torch.ops.aten

DONATED = "donated"
"""In the meta of an input of backward: forward saved it for backward, and nothing else shows its memory."""

STATIC_INPUT = "static_input"
"""In the meta of an input: somebody holds the tensor beyond each call, as a module does its parameters."""

TRACED_RESULTS = "traced_results"
"""In the meta of the output node of backward: its results as :func:`traced_results` gives them."""

# Their result shares memory with the first argument although the schema does not say so.
_UNANNOTATED_VIEWS = frozenset({_aten._unsafe_view.default, _aten._reshape_alias.default})


def view_source(node: torch.fx.Node) -> torch.fx.Node | None:
    """The input whose memory ``node`` shows in another form; None when ``node`` has memory of its own."""
    first = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(first, torch.fx.Node):
        return None
    if node.target is operator.getitem:
        return first if view_source(first) is not None else None
    return first if isinstance(node.target, torch._ops.OpOverload) and _shows_first_argument(node.target) else None


def memory_root(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory ``node`` shows: itself, unless it is a view."""
    while (source := view_source(node)) is not None:
        node = source
    return node


@lru_cache(maxsize=4096)  # passes ask about every node, and schemas are slow to read: 2 us against 0.2 us
def _shows_first_argument(target: torch._ops.OpOverload) -> bool:
    schema = target._schema
    annotated = bool(schema.arguments) and schema.arguments[0].alias_info is not None
    return target in _UNANNOTATED_VIEWS or (annotated and any(result.alias_info for result in schema.returns))


class TracedResult(NamedTuple):
    """What eager returns as a gradient: equal for two that are one tensor; with ``shows_tangent``, in its memory."""

    node: str
    shows_tangent: bool


def traced_results(joint: torch.fx.Graph, forward_results: int) -> tuple[TracedResult | None, ...]:
    """The results of backward in a joint graph that no pass has changed, None for what is no tensor."""
    results: Any = joint.output_node().args[0]
    return tuple(
        TracedResult(result.name, is_tangent(memory_root(result))) if isinstance(result, torch.fx.Node) else None
        for result in results[forward_results:]
    )


# Address the storage of their argument from its start, and elements of it that the argument does not show.
_READ_STORAGE = frozenset({_aten.as_strided.default, _aten.as_strided_copy.default, _aten.as_strided_scatter.default})


class Aliases:
    """Sharing of memory in one graph at the time of construction.

    The root of a node is the node whose memory it shows: itself, unless it is a view.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._root: dict[torch.fx.Node, torch.fx.Node] = {}
        written: set[torch.fx.Node] = set()
        through: set[torch.fx.Node] = set()
        storages: set[torch.fx.Node] = set()
        for node in graph.nodes:
            source = view_source(node)
            self._root[node] = node if source is None else self._root[source]
            if node.target in _READ_STORAGE:
                storages.add(self._root[node.all_input_nodes[0]])
            for argument in mutated_arguments(node):
                written.add(self._root[argument])
                view: torch.fx.Node | None = argument
                while view is not None:
                    through.add(view)
                    view = view_source(view)
            if NOTED in node.meta:
                written.update(self._root[argument] for argument in arguments_sharing_memory(node))
        self.written = frozenset(written)
        """Roots whose memory some operator of the graph writes in place, or will where it shows in another argument."""
        self.written_through = frozenset(through)
        """Nodes that some operator writes to, or to a view of them: they must show the memory itself."""
        self.read_as_storage = frozenset(storages)
        """Roots whose storage some operator addresses: another tensor with the same elements cannot stand for them."""
        self.returned = frozenset(self._root[value] for value in graph.output_node().all_input_nodes)
        """Roots whose memory leaves the graph."""

        shown = Counter(self._root.values())
        self._viewed = frozenset(root for root, count in shown.items() if count > 1)

    def is_viewed(self, root: torch.fx.Node) -> bool:
        """Whether another node shows the memory of ``root``."""
        return root in self._viewed

    def root(self, node: torch.fx.Node) -> torch.fx.Node:
        return self._root[node]

    def any_written(self, nodes: Iterable[torch.fx.Node]) -> bool:
        return any(self._root[node] in self.written for node in nodes)
