"""What the nodes of a joint graph are to the partition: forward's, backward's or either's, savable, recomputable."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental._backward_state import BackwardState
from torch.utils.checkpoint import CheckpointPolicy

from torchkiln.graph.aliases import Aliases, memory_root, view_source
from torchkiln.graph.effects import has_effect
from torchkiln.graph.tangents import is_random_state_of_backward, is_tangent
from torchkiln.partition import kinds
from torchkiln.partition.kinds import computing_node, is_projection
from torchkiln.partition.nbytes import Bytes
from torchkiln.partition.recomputed_form import has_recomputed_form, recompute_inputs


class NodeInfo:
    """Facts about the nodes of one joint graph that no setting changes; the graph must not change either.

    The first ``num_fwd_outputs`` results are those of forward. Every node is in exactly one of ``required_forward``,
    ``required_backward`` and ``either``, the output aside.
    """

    def __init__(self, graph: Graph, num_fwd_outputs: int) -> None:
        self.graph = graph
        results = graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        self.forward_results: tuple[Any, ...] = tuple(results[:num_fwd_outputs])
        self.backward_results: tuple[Any, ...] = tuple(results[num_fwd_outputs:])
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        """Every node, in graph order, with its place."""
        self.reads = {node: tuple(node.all_input_nodes) for node in self.position}
        """What every node is computed from; here, since a node makes the list anew whenever it is asked."""
        self.aliases = Aliases(graph)
        self.views = {node: source for node in self.position if (source := view_source(node)) is not None}
        """Nodes that show the memory of another node, with that node."""
        self.sizes = Bytes()
        placeholders = graph.find_nodes(op="placeholder")
        self.tangents = tuple(filter(is_tangent, placeholders))
        states = [n for n in placeholders if isinstance(n.meta.get("val"), BackwardState)]
        self.backward_only = (*filter(is_random_state_of_backward, placeholders), *states)
        """Inputs that AOTAutograd feeds to backward alone, beside the tangents."""
        others = {*self.tangents, *self.backward_only}
        self.forward_inputs = tuple(node for node in placeholders if node not in others)

    @cached_property
    def required_forward(self) -> frozenset[Node]:
        """What the results and the effects of forward need, and the inputs of forward."""
        after_tangents: set[Node] = {*self.tangents, *self.backward_only}
        wanted = nodes_in(self.forward_results)
        for node in self.position:
            if not after_tangents.isdisjoint(self.reads[node]):
                after_tangents.add(node)
            elif node.op not in ("placeholder", "output") and _is_forwards(node) and has_effect(node):
                wanted.append(node)
        return self.with_sources(self.forward_inputs, wanted)

    def with_sources(self, known: Iterable[Node], wanted: Iterable[Node]) -> frozenset[Node]:
        """``known``, ``wanted``, and all that ``wanted`` is computed from beside ``known``."""
        found, pending = set(known), list(wanted)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending.extend(self.reads[node])
        return frozenset(found)

    @cached_property
    def required_backward(self) -> frozenset[Node]:
        """What is computed from incoming gradients, and effects that belong to backward."""
        found: set[Node] = {*self.tangents, *self.backward_only}
        for node in self.position:
            if node.op in ("placeholder", "output") or node in self.required_forward:
                continue
            here = node.meta.get("partitioner_tag") == "must_be_in_backward" or has_effect(node)
            if here or not found.isdisjoint(self.reads[node]):
                found.add(node)
        return frozenset(found)

    @cached_property
    def outside_backward(self) -> tuple[Node, ...]:
        """All nodes but those of ``required_backward``, in graph order."""
        return tuple(node for node in self.position if node not in self.required_backward)

    @cached_property
    def either(self) -> frozenset[Node]:
        """What neither needs by itself: computed in forward where its result is saved, in backward otherwise."""
        required = self.required_forward
        return frozenset(node for node in self.outside_backward if node.op != "output" and node not in required)

    @cached_property
    def recompute_reads(self) -> dict[Node, tuple[Node, ...]]:
        """What nodes outside of ``required_backward`` are computed from when they are recomputed."""
        return {node: tuple(recompute_inputs(node)) for node in self.outside_backward}

    @cached_property
    def read_by_backward(self) -> tuple[Node, ...]:
        """Nodes outside of ``required_backward`` that backward reads, in graph order."""
        read = set(nodes_in(self.backward_results)).union(*(self.reads[node] for node in self.required_backward))
        return tuple(node for node in self.outside_backward if node in read)

    @cached_property
    def recomputable(self) -> frozenset[Node]:
        """Nodes that give the same value when they are recomputed, from ``recompute_reads``."""
        return frozenset(node for node in self.outside_backward if _is_recomputable(node, self.aliases))

    @cached_property
    def savable(self) -> frozenset[Node]:
        """Nodes whose value can be handed from forward to backward."""
        return frozenset(filter(self._is_savable, self.outside_backward))

    def _is_savable(self, node: Node) -> bool:
        if node.op == "placeholder":
            return True
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return False  # its parts are
        if node not in self.recomputable:
            return True
        if node.op == "get_attr" or node in self.views or node in self.requested:
            return False
        return not isinstance(value, (torch.SymFloat, torch.SymBool))

    @cached_property
    def alive_anyway(self) -> frozenset[Node]:
        """Roots of memory that outlives forward whatever is saved: that of inputs and of results."""
        return self.roots((*self.forward_inputs, *self.forward_results))

    @cached_property
    def handed_out(self) -> frozenset[Node]:
        """Roots of the memory of gradients, which the caller gets."""
        return self.roots(self.backward_results)

    def roots(self, values: Iterable[Any]) -> frozenset[Node]:
        """The nodes whose memory the nodes among ``values`` show."""
        return frozenset(map(self.aliases.root, nodes_in(values)))

    @cached_property
    def nbytes(self) -> dict[Node, int]:
        """The memory that saving the node keeps alive: its own, 0 where that is alive anyway."""
        root, sizes, alive = self.aliases.root, self.sizes, self.alive_anyway
        return {n: 0 if root(n) in alive else sizes.of(n.meta.get("val")) for n in self.outside_backward}

    @cached_property
    def activation_bytes(self) -> dict[Node, int]:
        """The bytes of tensors whose memory is neither the caller's nor another node's."""
        others = self.alive_anyway | self.handed_out
        return {
            node: self.sizes.of(value)
            for node in self.position
            if node.op == "call_function" and node not in others and self.aliases.root(node) is node
            if isinstance(value := node.meta.get("val"), torch.Tensor)
        }

    @cached_property
    def free(self) -> frozenset[Node]:
        """Nodes that nothing runs for."""
        return frozenset(filter(kinds.is_free, self.position))

    @cached_property
    def handed_out_calls(self) -> tuple[Node, ...]:
        """Library calls of backward whose results nothing else of backward is computed from, in graph order.

        None that does more than compute: draws of random numbers keep their order.
        """
        read: set[Node] = set()
        found = []
        for node in reversed(list(self.position)):
            if node.op == "output" or node not in self.required_backward:
                continue
            if node not in read and kinds.runs_outside_kernels(node) and not has_effect(node):
                found.append(node)
            if node in read or node not in self.free:
                read.update(self.reads[node])
        return tuple(reversed(found))

    @property
    def requested(self) -> frozenset[Node]:
        """Nodes that activation checkpointing asks to recompute."""
        return self._checkpointed[0]

    @property
    def kept(self) -> frozenset[Node]:
        """Nodes that activation checkpointing asks to save, and those that leave a checkpointed region."""
        return self._checkpointed[1]

    @cached_property
    def _checkpointed(self) -> tuple[frozenset[Node], frozenset[Node]]:
        """Nodes to recompute and nodes to save by the user's request.

        What is to be offloaded to the memory of the processor is saved: it is there already. So is what leaves its
        region and is needed for the gradients of what is outside, like the arguments of a region are: one region is
        recomputed at a time.
        """
        tagged = [node for node in self.outside_backward if node.meta.get("recompute") is not None]
        if not tagged:
            return frozenset(), frozenset()
        outside = _Outside(self)
        requested: set[Node] = set()
        kept: set[Node] = set()
        for node in tagged:
            if node.meta["recompute"] not in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
                kept.add(node)
            elif node in self.recomputable:
                (kept if node not in self.views and outside.needs(node) else requested).add(node)
        return frozenset(requested), frozenset(kept)


def nodes_in(values: Iterable[Any]) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]


def _is_forwards(node: Node) -> bool:
    return node.meta.get("partitioner_tag", "is_forward") in ("is_forward", "must_be_in_forward")


def _is_recomputable(node: Node, aliases: Aliases) -> bool:
    if node.op == "get_attr":
        return node not in aliases.written
    if node.op != "call_function":
        return False
    if view_source(node) is not None:
        return True
    source = computing_node(node)
    if isinstance(node.meta.get("val"), torch.SymInt):
        return False  # an integer of eight bytes, which other shapes are made of
    if has_effect(source) and not _is_read_of_float(source):
        return False
    if _compares_computed_values(node) or not has_recomputed_form(node) or _keeps_an_input(node, aliases):
        return False
    return node not in aliases.written and not aliases.any_written(recompute_inputs(source))


def _compares_computed_values(node: Node) -> bool:
    """Whether ``node`` asks for the equality of floating-point numbers one of which kernels compute on the way.

    Another kernel rounds elsewhere: half-precision values that several others read, and products added to a sum. The
    gradient of a maximum looks for it among all elements, and divides by how often it was found.
    """
    if node.target not in (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor):
        return False
    operands = list(map(memory_root, node.all_input_nodes))  # one where it is compared with itself
    return len(operands) > 1 and any(kinds.is_fusible(x) and x.meta["val"].is_floating_point() for x in operands)


def _keeps_an_input(node: Node, aliases: Aliases) -> bool:
    """Whether ``node`` copies an input: AOTAutograd and users do so because the input is written to before backward."""
    is_copy = node.target is torch.ops.aten.clone.default
    return is_copy and any(aliases.root(source).op == "placeholder" for source in node.all_input_nodes)


def _is_read_of_float(node: Node) -> bool:
    """Whether ``node`` reads a float from a tensor, which is saved in its place: graphs hand over integers only."""
    is_read = node.target is torch.ops.aten._local_scalar_dense.default
    return is_read and isinstance(node.meta.get("val"), torch.SymFloat)


class _Outside:
    """What is outside of a checkpointed region, and which values of the region that needs in backward."""

    def __init__(self, info: NodeInfo) -> None:
        self._info = info
        # What backward reads, and what that can be recomputed from.
        self._wanted: set[Node] = set()
        # Of the operators in each region; those of their gradients have the same.
        self._numbers: dict[object, set[object]] = {}
        read = set(info.read_by_backward)
        for node in reversed(info.outside_backward):
            if node in read or any(user in self._wanted and user in info.recomputable for user in node.users):
                self._wanted.add(node)
            if _is_forwards(node):
                self._numbers.setdefault(node.meta.get("ac_graph_id"), set()).add(node.meta.get("seq_nr"))

    def needs(self, node: Node) -> bool:
        """Whether gradients of what is outside of the region of ``node`` are computed with it."""
        region = node.meta.get("ac_graph_id")
        leaves = needed = False
        pending = list(node.users)
        while pending:
            user = pending.pop()
            forward = user not in self._info.required_backward and user.op != "output" and _is_forwards(user)
            if forward and user.meta.get("ac_graph_id") != region:
                leaves = leaves or not is_projection(user)
                needed = needed or user in self._wanted
            elif user in self._info.views:
                pending.extend(user.users)
            elif not forward and user.op != "output":
                number = user.meta.get("seq_nr")
                needed = needed or number is None or number not in self._numbers[region]
        return leaves and needed
