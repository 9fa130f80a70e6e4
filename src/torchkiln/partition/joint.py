"""The simple partition: forward does what eager's forward did, and saves what backward reads.

Views and freshly filled tensors are not saved: backward makes them again from what it has, which costs nothing. Nor
are random numbers that a seed reproduces and what is computed from them alone, such as dropout masks. What activation
checkpointing asks to compute again is computed again, right before backward first reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols
from torch.utils.checkpoint import CheckpointPolicy

from torchkiln.graph.aliases import Aliases, view_source
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.seeded import seeded_values
from torchkiln.graph.subgraphs import module_of

# Tensors that are cheaper to fill again than to keep.
_CREATIONS = frozenset(
    {
        "aten::arange",
        "aten::full",
        "aten::ones",
        "aten::scalar_tensor",
        "aten::zeros",
        "prims::iota",
    }
)

try:  # torch 2.12 and later describe these apart
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsNoVcCheckAOTOutput as _UncheckedOutput
except ImportError:
    _UncheckedOutput = SavedForBackwardsAOTOutput  # type: ignore[assignment,misc]


@dataclass(frozen=True)
class _Inputs:
    """Placeholders of the joint graph by what AOTAutograd feeds them with."""

    forward: tuple[torch.fx.Node, ...]
    tangents: tuple[torch.fx.Node, ...]
    backward_only: tuple[torch.fx.Node, ...]


def partition_joint_graph(
    joint_module: torch.fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: Any = None,
    **_later: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and the backward of ``joint_module``, in the calling convention of AOTAutograd.

    Forward returns its own ``num_fwd_outputs`` values, then the saved tensors, other saved objects, and the saved
    sizes; backward takes the sizes, the tensors, the objects and then the tangents.
    """
    graph = joint_module.graph
    inputs = _sort_inputs(graph)
    results = _flat_outputs(graph)
    forward_results, backward_results = results[:num_fwd_outputs], results[num_fwd_outputs:]
    output = graph.output_node()
    descriptions = list(output.meta.get("desc") or [None] * len(results))

    in_forward = _forward_nodes(joint_module, inputs, forward_results)
    recomputed = _recomputed_nodes(joint_module, in_forward)
    saved = _saved_nodes(graph, in_forward, recomputed, backward_results)
    tensors, objects, sizes = _sort_saved(graph, saved, inputs)

    saved_in_order = [*tensors, *objects, *sizes]
    forward_graph = _extract(
        graph,
        inputs.forward,
        [node for node in graph.nodes if node in in_forward],
        [*forward_results, *saved_in_order],
        descriptions[:num_fwd_outputs] + [_describe(node, k) for k, node in enumerate(saved_in_order)],
    )
    backward_graph = _extract(
        graph,
        (*sizes, *tensors, *objects, *inputs.tangents, *inputs.backward_only),
        _backward_order(graph, in_forward, recomputed, backward_results),
        backward_results,
        descriptions[num_fwd_outputs:],
    )
    return module_of(joint_module, forward_graph), module_of(joint_module, backward_graph)


def _sort_inputs(graph: torch.fx.Graph) -> _Inputs:
    forward, tangents, seeds, states = [], [], [], []
    for node in graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if "tangents" in name:
            tangents.append(node)
        elif "bwd_seed" in name or "bwd_base_offset" in name:
            seeds.append(node)
        elif type(node.meta.get("val")).__name__ == "BackwardState":
            states.append(node)
        else:
            forward.append(node)
    return _Inputs(tuple(forward), tuple(tangents), (*seeds, *states))


def _flat_outputs(graph: torch.fx.Graph) -> list[Any]:
    values = graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    return list(values)


def _forward_nodes(module: torch.fx.GraphModule, inputs: _Inputs, forward_results: Iterable[Any]) -> set[torch.fx.Node]:
    """Nodes the forward graph runs: those traced in forward, and whatever its results or their effects need."""
    graph = module.graph
    after_tangents: set[torch.fx.Node] = set(inputs.tangents) | set(inputs.backward_only)
    for node in graph.nodes:
        if not after_tangents.isdisjoint(node.all_input_nodes):
            after_tangents.add(node)

    wanted = [value for value in forward_results if isinstance(value, torch.fx.Node)]
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in after_tangents:
            continue
        tag = node.meta.get("partitioner_tag", "is_forward")
        if tag in ("is_forward", "must_be_in_forward"):
            wanted.append(node)
    found = set(inputs.forward)
    while wanted:
        node = wanted.pop()
        if node not in found:
            found.add(node)
            wanted.extend(node.all_input_nodes)
    return found


def _recomputed_nodes(module: torch.fx.GraphModule, in_forward: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """Forward nodes that backward makes again for itself rather than having them saved."""
    found: set[torch.fx.Node] = set()
    aliases = Aliases(module.graph)
    random = seeded_values(module.graph)
    for node in module.graph.nodes:
        if node not in in_forward or node.op == "placeholder":
            continue
        if node in random:
            found.add(node)
            continue
        if node.op == "get_attr" or _is_creation(node):
            if node not in aliases.written:
                found.add(node)
        elif view_source(node) is not None or _is_recomputed_by_request(node, in_forward, aliases):
            found.add(node)
    return found


def _is_recomputed_by_request(node: torch.fx.Node, in_forward: set[torch.fx.Node], aliases: Aliases) -> bool:
    """Whether checkpointing asks for ``node`` to be computed again, and that gives the value it had.

    What leaves its checkpointed region is kept like the arguments of a region are, so that one region is computed
    again at a time. Random numbers are kept too: drawn again, they would be others.
    """
    policy = node.meta.get("recompute")
    if policy not in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return False
    source = _computing_node(node)
    if has_effect(source) or aliases.any_written(source.all_input_nodes):
        return False
    region = node.meta.get("ac_graph_id")
    return all(
        _is_projection(user) or user.meta.get("ac_graph_id") == region
        for user in node.users
        if user in in_forward and user.op != "output"
    )


def _computing_node(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose operator computes ``node``, which may be one of several results of it."""
    while _is_projection(node):
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        node = source
    return node


def _is_projection(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _backward_order(
    graph: torch.fx.Graph,
    in_forward: set[torch.fx.Node],
    recomputed: set[torch.fx.Node],
    backward_results: Iterable[Any],
) -> list[torch.fx.Node]:
    """The nodes of backward, each recomputed one right before the first that needs it.

    All at the start would hold the values of every checkpointed region at once.
    """
    order: dict[torch.fx.Node, None] = {}

    def add(node: torch.fx.Node) -> None:
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [n for n in current.all_input_nodes if n in recomputed and n not in order]
            if missing:
                pending.extend(reversed(missing))
            else:
                order.setdefault(pending.pop())

    for node in graph.nodes:
        if node not in in_forward:
            add(node)
    for value in backward_results:
        if isinstance(value, torch.fx.Node) and value in recomputed:
            add(value)
    return list(order)


def _is_creation(node: torch.fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    return target._schema.name in _CREATIONS


def _saved_nodes(
    graph: torch.fx.Graph,
    in_forward: set[torch.fx.Node],
    recomputed: set[torch.fx.Node],
    backward_results: Iterable[Any],
) -> list[torch.fx.Node]:
    """Forward values that backward reads, directly or through the nodes it recomputes, in graph order.

    Takes out of ``recomputed`` what backward does not need, and what would cost a saved value more than it spares.
    """
    read: set[torch.fx.Node] = {value for value in backward_results if isinstance(value, torch.fx.Node)}
    for node in graph.nodes:
        if node not in in_forward and node.op != "output":
            read.update(node.all_input_nodes)
    saved: set[torch.fx.Node] = set()
    needed: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in read or node not in in_forward:
            continue
        if node in recomputed:
            needed.add(node)
            read.update(node.all_input_nodes)
        else:
            saved.add(node)
    recomputed &= needed
    return [node for node in graph.nodes if node in saved]


def _sort_saved(
    graph: torch.fx.Graph, saved: Iterable[torch.fx.Node], inputs: _Inputs
) -> tuple[list[torch.fx.Node], list[torch.fx.Node], list[torch.fx.Node]]:
    """Saved nodes as (tensors, other objects, sizes), with the sizes that the shapes of the others are made of."""
    checked: list[torch.fx.Node] = []
    unchecked: list[torch.fx.Node] = []
    objects: list[torch.fx.Node] = []
    sizes: list[torch.fx.Node] = []
    for node in saved:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            sizes.append(node)
        elif isinstance(value, torch.Tensor):
            # Values an autograd.Function kept on its context are not guarded against later writes.
            (unchecked if node.meta.get("saved_tensor_with_no_vc_check") else checked).append(node)
        else:
            objects.append(node)
    bindings: dict[Any, torch.fx.Node] | None = None
    bound = {value.node.expr for node in sizes if isinstance(value := node.meta.get("val"), torch.SymInt)}
    names = []
    for node in (*sizes, *checked, *unchecked, *inputs.tangents):
        if "val" not in node.meta:
            continue
        for symbol in sorted(free_symbols(node.meta["val"]) - bound, key=str):
            bindings = find_symbol_binding_fx_nodes(graph) if bindings is None else bindings
            if symbol in bindings:
                names.append(bindings[symbol])
                bound.add(symbol)
    return [*checked, *unchecked], objects, [*names, *sizes]


def _describe(node: torch.fx.Node, position: int) -> object:
    if isinstance(node.meta.get("val"), torch.Tensor) and node.meta.get("saved_tensor_with_no_vc_check"):
        return _UncheckedOutput(position)
    return SavedForBackwardsAOTOutput(position)


def _extract(
    graph: torch.fx.Graph,
    inputs: Sequence[torch.fx.Node],
    nodes: Iterable[torch.fx.Node],
    results: Sequence[Any],
    descriptions: Sequence[object],
) -> torch.fx.Graph:
    """A graph of its own that computes ``results`` with ``nodes`` from ``inputs``."""
    extracted = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in inputs:
        copies[node] = extracted.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        if node not in copies and node.op not in ("placeholder", "output"):
            copies[node] = extracted.node_copy(node, copies.__getitem__)
    output = extracted.output(tuple(copies[value] if isinstance(value, torch.fx.Node) else value for value in results))
    output.meta["desc"] = list(descriptions)
    output.meta["output_stack_traces"] = [
        value.meta.get("stack_trace") if isinstance(value, torch.fx.Node) else None for value in results
    ]
    eliminate_dead_code(extracted, has_effect)
    return extracted
