"""An inference graph in two: what depends on weights alone, and what runs at each call.

The first graph runs when a weight has changed, and its results are further inputs of the second. A value is worth
keeping where it takes an operation to compute (views are free) and is no larger than the weights it is made of, so that
a small tensor does not become a large one in memory. What the graph returns is computed at each call: the caller may
write to it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.fx

from torchkiln.graph.aliases import STATIC_INPUT, memory_root, view_source
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import tensors_of
from torchkiln.graph.subgraphs import module_of
from torchkiln.graph.weights import PREPARED, is_packed_weight, is_weight, weight_values
from torchkiln.passes.post_grad.common_subexpressions import merge_common_subexpressions

_SMALL = 64 * 1024
"""Values of up to as many bytes are kept however small the weights are that they are made of."""


@dataclass(frozen=True)
class Hoisted:
    """``weights`` takes the inputs ``taken`` of the captured order and returns what ``rest`` gets after its inputs."""

    weights: torch.fx.GraphModule
    rest: torch.fx.GraphModule
    taken: tuple[int, ...]

    def __str__(self) -> str:
        return f"weights of inputs {list(self.taken)}:\n{self.weights.graph}\nrest:\n{self.rest.graph}"


def hoist(graph_module: torch.fx.GraphModule) -> Hoisted | None:
    """Divide an inference graph whose weights are marked; ``graph_module`` becomes the rest. None: nothing to hoist."""
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    if not any(map(is_weight, placeholders)):
        return None
    merge_common_subexpressions(graph_module)  # a cast that two layers read is kept once
    chosen = _worth_keeping(graph, weight_values(graph))
    if not chosen:
        return None
    needed = _ancestors(chosen)
    taken = tuple(k for k, node in enumerate(placeholders) if node in needed)
    weights = _graph_of(graph_module, [placeholders[k] for k in taken], chosen, needed)
    _replace_by_inputs(graph, placeholders[-1], chosen)
    return Hoisted(weights, graph_module, taken)


def _worth_keeping(graph: torch.fx.Graph, constant: frozenset[torch.fx.Node]) -> list[torch.fx.Node]:
    """The values that the rest of the graph reads, in graph order.

    One that is too large is computed at each call, from values that are looked at in its place.
    """
    chosen: list[torch.fx.Node] = []
    computed = {node for node in graph.nodes if node not in constant}
    returned = {memory_root(node) for node in graph.output_node().all_input_nodes}
    made_of = _weights_under(graph, constant)
    for node in reversed(graph.nodes):  # readers before what they read
        if node not in constant or is_weight(node) or not any(user in computed for user in node.users):
            continue
        if node not in returned and _is_kept(node, made_of[node]):
            chosen.append(node)
        else:
            computed.add(node)
    return chosen[::-1]


def _is_kept(node: torch.fx.Node, weights: frozenset[torch.fx.Node]) -> bool:
    values = tensors_of(node.meta.get("val"))
    if not weights or not isinstance(node.meta.get("val"), torch.Tensor) or view_source(node) is not None:
        return False  # a view is made at each call, of what is kept
    if is_packed_weight(node):
        return True
    return _bytes(values) <= max(_SMALL, sum(_bytes(tensors_of(w.meta["val"])) for w in weights))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _weights_under(
    graph: torch.fx.Graph, constant: frozenset[torch.fx.Node]
) -> dict[torch.fx.Node, frozenset[torch.fx.Node]]:
    found: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node in constant:
            sources = (found[source] for source in node.all_input_nodes)
            found[node] = frozenset({node}) if is_weight(node) else frozenset().union(*sources)
    return found


def _ancestors(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    found, waiting = set[torch.fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _graph_of(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[torch.fx.Node],
    results: Sequence[torch.fx.Node],
    needed: set[torch.fx.Node],
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {node: graph.node_copy(node) for node in inputs}
    for node in graph_module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return module_of(graph_module, graph)


def _replace_by_inputs(graph: torch.fx.Graph, last: torch.fx.Node, chosen: Sequence[torch.fx.Node]) -> None:
    for node in chosen:
        with graph.inserting_after(last):
            last = graph.placeholder(f"prepared_{node.name}")
        last.meta = {"val": node.meta["val"], STATIC_INPUT: True, PREPARED: is_packed_weight(node)}
        node.replace_all_uses_with(last)
    eliminate_dead_code(graph, has_effect)
    assert all(node.target is not operator.getitem or node.users for node in graph.nodes)
