"""Which node is it? Values of nodes before and after a pass, and of ever longer parts of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._pytree import tree_map

from torchkiln.debug.accuracy import Layout, divergence, layout_of, same_layout
from torchkiln.debug.float64 import InFloat64, widened
from torchkiln.debug.rounding import rounded_anew
from torchkiln.graph.eager_run import OnCopies, copies_of, state_kept
from torchkiln.graph.nodes import nodes_in
from torchkiln.graph.subgraphs import copy_graph_module, module_of

_SEED = 7


class _Recording(OnCopies):
    """Keeps what every node computes, copied before anything writes to it, and how it was laid out."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.values: dict[str, Any] = {}
        self.layouts: dict[str, Layout | None] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            self.values[n.name] = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)
            self.layouts[n.name] = layout_of(value)
        return value


def node_values(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], *, wide: bool = False) -> dict[str, Any]:
    """What each node computes, by name, with the same random numbers in every run; in float64 where ``wide``."""
    return _recorded(graph_module, inputs, wide=wide).values


def _recorded(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], *, wide: bool = False) -> _Recording:
    interpreter = _Recording(graph_module)
    given = copies_of(list(inputs))
    with state_kept(), torch.no_grad():
        torch.manual_seed(_SEED)
        if wide:
            given = widened(given)
            with InFloat64():
                interpreter.run(*given)
        else:
            interpreter.run(*given)
    return interpreter


def node_changed_by_pass(
    before: torch.fx.GraphModule, after: torch.fx.GraphModule, inputs: Sequence[Any]
) -> torch.fx.Node | None:
    """The first node of ``after`` that computes something else than the node of its name did ``before``.

    Where that node itself was not edited, it is the last edited one that it depends on.
    """
    try:
        old, new = node_values(before, inputs), node_values(after, inputs)
    except Exception:  # a graph that does not run has no values
        return None
    exact = _wide_values(before, inputs)
    others = rounded_anew(lambda: node_values(before, inputs))
    edited = _edited(before.graph, after.graph)
    returned = _returned(before.graph, after.graph)
    for node in after.graph.nodes:
        name = returned.get(node.name, node.name)
        if name not in old or node.name not in new:
            continue
        runs = [other[name] for other in others]
        if divergence(name, new[node.name], old[name], exact.get(name), runs) is not None:
            return _last_edited(node, edited) or node
    return None


def node_laid_out_by_pass(
    before: torch.fx.GraphModule, after: torch.fx.GraphModule, inputs: Sequence[Any]
) -> torch.fx.Node | None:
    """The first node whose strides a pass changed, of those that a result with other strides than before depends on.

    Where that node itself was not edited, it is the last edited one that it depends on.
    """
    try:
        old, new = _recorded(before, inputs).layouts, _recorded(after, inputs).layouts
    except Exception:  # a graph that does not run has no values
        return None
    returned = _returned(before.graph, after.graph)

    def moved(node: torch.fx.Node) -> bool:
        return not same_layout(new.get(node.name), old.get(returned.get(node.name, node.name)))

    pending = [node for node in nodes_in(after.graph.output_node().args) if moved(node)]
    needed = set(pending)
    while pending:
        pending = [argument for node in pending for argument in node.all_input_nodes if argument not in needed]
        needed.update(pending)
    first = next((node for node in after.graph.nodes if node in needed and moved(node)), None)
    return None if first is None else _last_edited(first, _edited(before.graph, after.graph)) or first


def _returned(before: torch.fx.Graph, after: torch.fx.Graph) -> dict[str, str]:
    """Results of ``after`` and those of ``before`` in their place: a pass may give them other names."""
    old, new = (nodes_in(graph.output_node().args) for graph in (before, after))
    return {b.name: a.name for a, b in zip(old, new, strict=True)} if len(old) == len(new) else {}


def _wide_values(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    try:
        return node_values(graph_module, inputs, wide=True)
    except Exception:  # then values are compared with those before the pass alone
        return {}


def _edited(before: torch.fx.Graph, after: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes that are new, call something else, or read another of the nodes there were before."""
    names = {node.name for node in before.nodes}

    def signature(node: torch.fx.Node) -> tuple[Any, ...]:
        return node.op, str(node.target), repr(torch.fx.map_arg((node.args, node.kwargs), lambda n: "%"))

    def read(node: torch.fx.Node) -> list[str]:
        return [argument.name for argument in nodes_in((node.args, node.kwargs))]

    known = {node.name: (signature(node), read(node)) for node in before.nodes}
    edited = set()
    for node in after.nodes:
        if node.op == "output":
            continue
        target, arguments = known.get(node.name, (None, []))
        moved = target == signature(node) and any(
            new != old and new in names for new, old in zip(read(node), arguments, strict=True)
        )
        if moved or target != signature(node):
            edited.add(node)
    return edited


def _last_edited(node: torch.fx.Node, edited: set[torch.fx.Node]) -> torch.fx.Node | None:
    pending, seen = [node], {node}
    while pending:
        current = pending.pop(0)
        if current in edited:
            return current
        new = [argument for argument in current.all_input_nodes if argument not in seen]
        seen.update(new)
        pending += new
    return None


def first_failing_prefix(
    graph_module: torch.fx.GraphModule, fails: Callable[[torch.fx.GraphModule], bool]
) -> torch.fx.Node | None:
    """The last node of the shortest part of a graph, from its start, that ``fails``, found by halving."""
    nodes: list[torch.fx.Node] = _tensor_calls(graph_module)
    if not nodes or not fails(prefix(graph_module, len(nodes))):
        return None
    right, wrong = 0, len(nodes)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if fails(prefix(graph_module, middle)):
            wrong = middle
        else:
            right = middle
    return nodes[wrong - 1]


def prefix(graph_module: torch.fx.GraphModule, calls: int) -> torch.fx.GraphModule:
    """The graph up to its call number ``calls`` that gives a tensor; returned is what nothing in that part reads."""
    whole = copy_graph_module(graph_module)
    nodes = _tensor_calls(whole)
    last = nodes[calls - 1]
    kept: list[torch.fx.Node] = []
    for node in whole.graph.nodes:
        kept.append(node)
        if node is last:
            break
    inside = set(kept)
    ends = [n for n in nodes[:calls] if not any(user in inside for user in n.users)]
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in [*kept, *(n for n in whole.graph.find_nodes(op="placeholder") if n not in inside)]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in ends))
    output.meta["val"] = tuple(node.meta.get("val") for node in ends)
    return module_of(whole, graph)


def _tensor_calls(graph_module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    nodes = graph_module.graph.nodes
    return [node for node in nodes if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)]
