"""Both graphs of a joint graph, once it is decided what is saved, in the calling convention of AOTAutograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols
from torch.fx.node import map_arg

from torchkiln.graph.aliases import DONATED
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import SYMBOLIC
from torchkiln.graph.saved_values import describe_saved
from torchkiln.graph.subgraphs import module_of
from torchkiln.partition.classify import NodeInfo, nodes_in
from torchkiln.partition.recomputed_form import recomputed_form


class InfeasibleError(ValueError):
    """Backward needs a value that is neither saved nor recomputable."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """What forward and backward run, and what passes between them.

    The order is made when it is first asked for: of many schedules that are weighed, few are looked at so closely.
    """

    info: NodeInfo
    saved: tuple[Node, ...]
    """In graph order, inputs of forward included."""
    in_forward: frozenset[Node]
    extra: frozenset[Node]
    """What backward runs beside ``info.required_backward``."""

    @cached_property
    def recomputed(self) -> frozenset[Node]:
        """Nodes of ``backward`` that ``forward`` runs as well."""
        return self.extra & self.in_forward

    @cached_property
    def forward(self) -> tuple[Node, ...]:
        return tuple(node for node in self.info.position if node in self.in_forward and node.op != "placeholder")

    @cached_property
    def backward(self) -> tuple[Node, ...]:
        return tuple(_backward_order(self.info, self.extra))


def schedule_for(info: NodeInfo, chosen: Collection[Node]) -> Schedule:
    """The schedule in which backward reads what of ``chosen`` it needs, and makes the rest from that.

    Inputs of forward need not be among ``chosen``. Raises InfeasibleError where that is not enough.
    """
    saved: set[Node] = set()
    extra: set[Node] = set()
    pending = list(info.read_by_backward)
    while pending:
        node = pending.pop()
        if node in saved or node in extra:
            continue
        if node in chosen or node.op == "placeholder":
            saved.add(node)
        elif node in info.recomputable:
            extra.add(node)
            pending.extend(info.recompute_reads[node])
        else:
            raise InfeasibleError(f"backward needs {node}, which is not saved and cannot be recomputed")
    in_order = tuple(sorted(saved, key=info.position.__getitem__))
    return Schedule(info, in_order, info.with_sources(info.required_forward, saved), frozenset(extra))


def _backward_order(info: NodeInfo, extra: Collection[Node]) -> list[Node]:
    """The nodes of backward, each of ``extra`` right before the first that needs it.

    All at the start would hold the values of every recomputed region at once.
    """
    order: dict[Node, None] = {}

    def add(node: Node) -> None:
        pending = [node]
        while pending:
            current = pending[-1]
            sources = (info.recompute_reads if current in extra else info.reads)[current]
            missing = [n for n in sources if n in extra and n not in order]
            if missing:
                pending.extend(reversed(missing))
            else:
                order.setdefault(pending.pop())

    for node in info.position:
        if node in info.required_backward and node.op != "placeholder":
            add(node)
    for node in nodes_in(info.backward_results):
        if node in extra:
            add(node)
    return _handed_out_first(info, list(order), extra)


def _handed_out_first(info: NodeInfo, order: Sequence[Node], extra: Collection[Node]) -> list[Node]:
    """``order`` with library calls whose results are only handed out, such as gradients of weights, as early as can be.

    They are the last to read the values that were saved for them. The memory of those is then there for what comes
    next, the gradient that goes on, and does not come on top of it.
    """
    inside = set(order)

    def sources(node: Node) -> list[Node]:
        return [n for n in (info.recompute_reads if node in extra else info.reads)[node] if n in inside]

    waiting: dict[Node, int] = {}
    readers: dict[Node, list[Node]] = {}
    for node in info.handed_out_calls:
        found = _computed(sources, node, info.free)
        waiting[node] = len(found)
        for source in found:
            readers.setdefault(source, []).append(node)
    result: dict[Node, None] = {}
    for node in order:
        result.setdefault(node)
        for reader in readers.get(node, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                missing = [reader]
                for needed in missing:  # views, which may be of views
                    missing += [source for source in sources(needed) if source not in result]
                result.update(dict.fromkeys(reversed(missing)))
    return list(result)


def _computed(sources: Callable[[Node], list[Node]], node: Node, free: Collection[Node]) -> set[Node]:
    """What must have run before ``node``, through views."""
    found: set[Node] = set()
    pending = sources(node)
    while pending:
        source = pending.pop()
        if source in free:
            pending.extend(sources(source))
        else:
            found.add(source)
    return found


def extract(joint_module: GraphModule, info: NodeInfo, schedule: Schedule) -> tuple[GraphModule, GraphModule]:
    """The modules of forward and backward.

    Forward returns its own values, then the saved tensors, other saved objects, and the saved sizes; backward takes
    the sizes, the tensors, the objects and then the tangents.
    """
    count = len(info.forward_results)
    results = count + len(info.backward_results)
    descriptions = list(info.graph.output_node().meta.get("desc") or [None] * results)
    tensors, objects, sizes = _sort_saved(info, schedule.saved)
    saved_in_order = [*tensors, *objects, *sizes]
    forward = _copy(
        info.forward_inputs,
        schedule.forward,
        [*info.forward_results, *saved_in_order],
        descriptions[:count] + [describe_saved(k, checked=not _unchecked(n)) for k, n in enumerate(saved_in_order)],
    )
    given = (*sizes, *tensors, *objects, *info.tangents, *info.backward_only)
    backward = _copy(given, schedule.backward, info.backward_results, descriptions[count:], info.required_backward)
    donated = _donated(info, tensors)
    for placeholder, node in zip(backward.find_nodes(op="placeholder"), given, strict=True):
        placeholder.meta[DONATED] = node in donated
    return module_of(joint_module, forward), module_of(joint_module, backward)


def _donated(info: NodeInfo, tensors: Iterable[Node]) -> set[Node]:
    """Of the saved tensors, those whose memory is neither an input's nor a result's, nor another saved tensor's."""
    roots = Counter(info.aliases.root(node) for node in tensors)
    others = info.alive_anyway | info.handed_out
    return {node for node in tensors if roots[root := info.aliases.root(node)] == 1 and root not in others}


def _sort_saved(info: NodeInfo, saved: Iterable[Node]) -> tuple[list[Node], list[Node], list[Node]]:
    """Saved nodes as (tensors, other objects, sizes), with the sizes that the shapes of the others are made of."""
    values = {node: node.meta.get("val") for node in saved}
    tensors = sorted((n for n, value in values.items() if isinstance(value, torch.Tensor)), key=_unchecked)
    sizes = [n for n, value in values.items() if isinstance(value, SYMBOLIC)]
    others = {*tensors, *sizes}
    objects = [node for node in values if node not in others]
    bound = {value.node.expr for node in sizes if isinstance(value := values[node], torch.SymInt)}
    symbols: dict[Any, None] = {}
    for node in (*sizes, *tensors, *info.tangents):
        if "val" in node.meta:
            symbols.update(dict.fromkeys(sorted(free_symbols(node.meta["val"]) - bound, key=str)))
    bindings = find_symbol_binding_fx_nodes(info.graph) if symbols else {}
    return tensors, objects, [*(bindings[symbol] for symbol in symbols if symbol in bindings), *sizes]


def _unchecked(node: Node) -> bool:
    """Whether a saved tensor is not guarded against later writes: an autograd.Function kept it on its context."""
    return isinstance(node.meta.get("val"), torch.Tensor) and bool(node.meta.get("saved_tensor_with_no_vc_check"))


def _copy(
    inputs: Sequence[Node],
    nodes: Iterable[Node],
    results: Sequence[Any],
    descriptions: Sequence[object],
    own: Collection[Node] | None = None,
) -> Graph:
    """A graph that computes ``results`` from ``inputs`` by ``nodes``; those that are not its ``own`` are recomputed."""
    extracted = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = extracted.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node in copies:
            continue
        form = recomputed_form(node) if own is not None and node not in own else None
        if form is None:
            copies[node] = extracted.node_copy(node, copies.__getitem__)
        else:
            target, args = form
            copies[node] = extracted.call_function(target, map_arg(args, copies.__getitem__))
            copies[node].meta = {**node.meta, "val": node.meta["val"][: len(target._schema.returns)]}
    output = extracted.output(tuple(copies[value] if isinstance(value, Node) else value for value in results))
    output.meta["desc"] = list(descriptions)
    output.meta["output_stack_traces"] = [
        value.meta.get("stack_trace") if isinstance(value, Node) else None for value in results
    ]
    eliminate_dead_code(extracted, has_effect)
    return extracted
