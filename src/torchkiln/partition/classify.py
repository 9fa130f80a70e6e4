"""What the nodes of a joint graph are to the partition: forward's, backward's or either's, savable, repeatable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx
from torch.fx.experimental._backward_state import BackwardState
from torch.utils.checkpoint import CheckpointPolicy

from torchkiln.graph.aliases import Aliases, view_source
from torchkiln.graph.effects import has_effect
from torchkiln.graph.tangents import is_random_state_of_backward, is_tangent
from torchkiln.partition import kinds
from torchkiln.partition.nbytes import Bytes
from torchkiln.partition.projections import computing_node, is_projection
from torchkiln.partition.repeats import is_part_of_repeat, repeat_inputs


@dataclass(frozen=True)
class JointInputs:
    """Placeholders of the joint graph by what AOTAutograd feeds them with."""

    forward: tuple[torch.fx.Node, ...]
    tangents: tuple[torch.fx.Node, ...]
    backward_only: tuple[torch.fx.Node, ...]


@dataclass(frozen=True)
class NodeInfo:
    """Facts about the nodes of one joint graph that no setting changes.

    Every node is in exactly one of ``required_forward``, ``required_backward`` and ``either``, the output aside.
    """

    graph: torch.fx.Graph
    inputs: JointInputs
    forward_results: tuple[Any, ...]
    backward_results: tuple[Any, ...]
    required_forward: frozenset[torch.fx.Node]
    """What the results and the effects of forward need, and the inputs of forward."""
    required_backward: frozenset[torch.fx.Node]
    """What is computed from incoming gradients, and effects that belong to backward."""
    either: frozenset[torch.fx.Node]
    """What neither needs by itself: computed in forward where its result is saved, in backward otherwise."""
    position: Mapping[torch.fx.Node, int]
    """Every node, in graph order, with its place."""
    reads: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
    """What every node is computed from; here, since a node makes the list anew whenever it is asked."""
    repeat_reads: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
    """What nodes outside of ``required_backward`` are computed from when they are computed again."""
    aliases: Aliases
    views: Mapping[torch.fx.Node, torch.fx.Node]
    """Nodes that show the memory of another node, with that node."""
    read_by_backward: tuple[torch.fx.Node, ...]
    """Nodes outside of ``required_backward`` that backward reads, in graph order."""
    repeatable: frozenset[torch.fx.Node]
    """Nodes that give the same value when they are computed again, from ``repeat_reads``."""
    savable: frozenset[torch.fx.Node]
    """Nodes whose value can be handed from forward to backward."""
    alive_anyway: frozenset[torch.fx.Node]
    """Roots of memory that outlives forward whatever is saved: that of inputs and of results."""
    requested: frozenset[torch.fx.Node]
    """Nodes that activation checkpointing asks to compute again."""
    kept: frozenset[torch.fx.Node]
    """Nodes that activation checkpointing asks to save, and those that leave a checkpointed region."""
    nbytes: Mapping[torch.fx.Node, int]
    """The memory that saving the node keeps alive: its own, 0 where that is alive anyway."""
    sizes: Bytes

    @cached_property
    def free(self) -> frozenset[torch.fx.Node]:
        """Nodes that nothing runs for."""
        return frozenset(node for node in self.position if kinds.is_free(node))

    @cached_property
    def handed_out_calls(self) -> tuple[torch.fx.Node, ...]:
        """Library calls of backward whose results nothing else of backward is computed from, in graph order.

        None that does more than compute: draws of random numbers keep their order.
        """
        read: set[torch.fx.Node] = set()
        found = []
        for node in reversed(list(self.position)):
            if node.op == "output" or node not in self.required_backward:
                continue
            if node not in read and kinds.runs_outside_kernels(node) and not has_effect(node):
                found.append(node)
            if node in read or node not in self.free:
                read.update(self.reads[node])
        return tuple(reversed(found))


def classify(graph: torch.fx.Graph, num_fwd_outputs: int) -> NodeInfo:
    """The facts about ``graph``, whose first ``num_fwd_outputs`` results are those of forward."""
    nodes = list(graph.nodes)
    inputs = _sort_inputs(graph)
    results = _flat_outputs(graph)
    forward_results, backward_results = results[:num_fwd_outputs], results[num_fwd_outputs:]
    forward = _required_forward(nodes, inputs, forward_results)
    backward = _required_backward(nodes, inputs, forward)
    either = frozenset(node for node in nodes if node.op != "output" and node not in forward and node not in backward)

    aliases = Aliases(graph)
    views = {node: source for node in nodes if (source := view_source(node)) is not None}
    read = {value for value in backward_results if isinstance(value, torch.fx.Node)}
    reads = {node: tuple(node.all_input_nodes) for node in nodes}
    for node in backward:
        read.update(reads[node])
    sizes = Bytes()
    alive = {aliases.root(node) for node in inputs.forward}
    alive.update(aliases.root(value) for value in forward_results if isinstance(value, torch.fx.Node))
    nbytes = {
        node: 0 if aliases.root(node) in alive else sizes.of(node.meta.get("val"))
        for node in nodes
        if node not in backward
    }
    repeatable = frozenset(node for node in nodes if node not in backward and _is_repeatable(node, aliases))
    requested, kept = _checkpointed(nodes, backward, views, repeatable, read)
    return NodeInfo(
        graph=graph,
        inputs=inputs,
        forward_results=tuple(forward_results),
        backward_results=tuple(backward_results),
        required_forward=forward,
        required_backward=backward,
        either=either,
        position={node: k for k, node in enumerate(nodes)},
        reads=reads,
        repeat_reads={node: tuple(repeat_inputs(node)) for node in nodes if node not in backward},
        aliases=aliases,
        views=views,
        read_by_backward=tuple(node for node in nodes if node in read and node not in backward),
        repeatable=repeatable,
        savable=frozenset(
            node for node in nodes if node not in backward and _is_savable(node, views, repeatable, requested)
        ),
        alive_anyway=frozenset(alive),
        requested=requested,
        kept=kept,
        nbytes=nbytes,
        sizes=sizes,
    )


def _sort_inputs(graph: torch.fx.Graph) -> JointInputs:
    forward, tangents, seeds, states = [], [], [], []
    for node in graph.find_nodes(op="placeholder"):
        if is_tangent(node):
            tangents.append(node)
        elif is_random_state_of_backward(node):
            seeds.append(node)
        elif isinstance(node.meta.get("val"), BackwardState):
            states.append(node)
        else:
            forward.append(node)
    return JointInputs(tuple(forward), tuple(tangents), (*seeds, *states))


def _flat_outputs(graph: torch.fx.Graph) -> list[Any]:
    values = graph.output_node().args[0]
    assert isinstance(values, (tuple, list))
    return list(values)


def _required_forward(
    nodes: Iterable[torch.fx.Node], inputs: JointInputs, forward_results: Iterable[Any]
) -> frozenset[torch.fx.Node]:
    after_tangents: set[torch.fx.Node] = {*inputs.tangents, *inputs.backward_only}
    wanted = [value for value in forward_results if isinstance(value, torch.fx.Node)]
    for node in nodes:
        if not after_tangents.isdisjoint(node.all_input_nodes):
            after_tangents.add(node)
        elif node.op not in ("placeholder", "output") and _is_forwards(node) and has_effect(node):
            wanted.append(node)
    found = set(inputs.forward)
    while wanted:
        node = wanted.pop()
        if node not in found:
            found.add(node)
            wanted.extend(node.all_input_nodes)
    return frozenset(found)


def _is_forwards(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag", "is_forward") in ("is_forward", "must_be_in_forward")


def _required_backward(
    nodes: Iterable[torch.fx.Node], inputs: JointInputs, forward: frozenset[torch.fx.Node]
) -> frozenset[torch.fx.Node]:
    found: set[torch.fx.Node] = {*inputs.tangents, *inputs.backward_only}
    for node in nodes:
        if node.op in ("placeholder", "output") or node in forward:
            continue
        here = node.meta.get("partitioner_tag") == "must_be_in_backward" or has_effect(node)
        if here or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_repeatable(node: torch.fx.Node, aliases: Aliases) -> bool:
    if node.op == "get_attr":
        return node not in aliases.written
    if node.op != "call_function":
        return False
    if view_source(node) is not None:
        return True
    source = computing_node(node)
    if isinstance(node.meta.get("val"), torch.SymInt):
        return False  # a number of eight bytes, which other shapes are made of
    if has_effect(source) and not _is_read_of_float(source):
        return False
    if _compares_computed_values(node):
        return False
    if not is_part_of_repeat(node) or _keeps_an_input(node, aliases):
        return False
    return node not in aliases.written and not aliases.any_written(repeat_inputs(source))


def _compares_computed_values(node: torch.fx.Node) -> bool:
    """Whether ``node`` asks for the equality of floating-point numbers one of which kernels compute on the way.

    Another kernel rounds elsewhere: half-precision values where several others read them, products where they join a
    sum. The gradient of a maximum looks for it among all elements, and divides by how often it was found.
    """
    if node.target not in (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor):
        return False
    operands = [_origin(operand) for operand in node.all_input_nodes]  # one where it is compared with itself
    return len(operands) > 1 and any(kinds.is_fusible(x) and x.meta["val"].is_floating_point() for x in operands)


def _origin(node: torch.fx.Node) -> torch.fx.Node:
    """What ``node`` is a view of, or itself."""
    while (source := view_source(node)) is not None:
        node = source
    return node


def _keeps_an_input(node: torch.fx.Node, aliases: Aliases) -> bool:
    """Whether ``node`` copies an input: AOTAutograd and users do so because the input is written to before backward."""
    is_copy = node.target is torch.ops.aten.clone.default
    return is_copy and any(aliases.root(source).op == "placeholder" for source in node.all_input_nodes)


def _is_read_of_float(node: torch.fx.Node) -> bool:
    """Whether ``node`` reads a float from a tensor, which is saved in its place: graphs hand over integers only."""
    is_read = node.target is torch.ops.aten._local_scalar_dense.default
    return is_read and isinstance(node.meta.get("val"), torch.SymFloat)


def _is_savable(
    node: torch.fx.Node,
    views: Mapping[torch.fx.Node, torch.fx.Node],
    repeatable: frozenset[torch.fx.Node],
    requested: frozenset[torch.fx.Node],
) -> bool:
    if node.op == "placeholder":
        return True
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return False  # its parts are
    if node not in repeatable:
        return True
    if node.op == "get_attr" or node in views or node in requested:
        return False
    return not isinstance(value, (torch.SymFloat, torch.SymBool))


def _checkpointed(
    nodes: Sequence[torch.fx.Node],
    backward: frozenset[torch.fx.Node],
    views: Mapping[torch.fx.Node, torch.fx.Node],
    repeatable: frozenset[torch.fx.Node],
    read: Collection[torch.fx.Node],
) -> tuple[frozenset[torch.fx.Node], frozenset[torch.fx.Node]]:
    """Nodes to compute again and nodes to save by the user's request.

    What is to be kept in the memory of the processor is saved: it is there already. So is what leaves its region and
    is needed for the gradients of what is outside, like the arguments of a region are: one region is computed again
    at a time.
    """
    tagged = [node for node in nodes if node.meta.get("recompute") is not None and node not in backward]
    if not tagged:
        return frozenset(), frozenset()
    outside = _Outside(nodes, backward, views, repeatable, read)
    again: set[torch.fx.Node] = set()
    kept: set[torch.fx.Node] = set()
    for node in tagged:
        if node.meta["recompute"] not in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
            kept.add(node)
        elif node in repeatable:
            (kept if node not in views and outside.needs(node) else again).add(node)
    return frozenset(again), frozenset(kept)


class _Outside:
    """What is outside of a checkpointed region, and which values of the region that needs in backward."""

    def __init__(
        self,
        nodes: Sequence[torch.fx.Node],
        backward: frozenset[torch.fx.Node],
        views: Mapping[torch.fx.Node, torch.fx.Node],
        repeatable: frozenset[torch.fx.Node],
        read: Collection[torch.fx.Node],
    ) -> None:
        self._backward = backward
        self._views = views
        # What backward reads, and what it can be computed again from.
        self._wanted: set[torch.fx.Node] = set()
        # Of the operators in each region; those of their gradients have the same.
        self._numbers: dict[object, set[object]] = {}
        for node in reversed(nodes):
            if node in backward:
                continue
            if node in read or any(user in self._wanted and user in repeatable for user in node.users):
                self._wanted.add(node)
            if _is_forwards(node):
                self._numbers.setdefault(node.meta.get("ac_graph_id"), set()).add(node.meta.get("seq_nr"))

    def needs(self, node: torch.fx.Node) -> bool:
        """Whether gradients of what is outside of the region of ``node`` are computed with it."""
        region = node.meta.get("ac_graph_id")
        leaves = needed = False
        pending = list(node.users)
        while pending:
            user = pending.pop()
            forward = user not in self._backward and user.op != "output" and _is_forwards(user)
            if forward and user.meta.get("ac_graph_id") != region:
                leaves = leaves or not is_projection(user)
                needed = needed or user in self._wanted
            elif user in self._views:
                pending.extend(user.users)
            elif not forward and user.op != "output":
                number = user.meta.get("seq_nr")
                needed = needed or number is None or number not in self._numbers[region]
        return leaves and needed
