"""A match in a graph, and putting something else in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.errors import PatternError
from torchkiln.graph.aliases import memory_root
from torchkiln.graph.effects import is_random
from torchkiln.graph.fake import VALUE_KEYS, same_metadata, same_sizes
from torchkiln.graph.strides import propagate_strides
from torchkiln.graph.tangents import after_tangents
from torchkiln.patterns.index import GraphIndex
from torchkiln.patterns.search import Found
from torchkiln.patterns.tracing import Tracer, fwd_only

# Kept on new nodes: where the replaced computation came from, and what the partition decided or was told about it.
_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "recompute", "ac_graph_id", "custom")


class Match:
    """A part of a graph that matches a pattern.

    ``captures`` holds what the pattern captured: nodes and constants, lists of them under names inside lists. With
    ``trains`` the pattern is of a joint graph, and some of the captures are gradients of its results.
    """

    def __init__(self, found: Found, index: GraphIndex, *, trains: bool = False) -> None:
        self.outputs = found.outputs
        self.nodes = found.nodes
        self.captures: Mapping[str, Any] = dict(found.captures)
        self.index = index
        self.trains = trains
        self.declined = ""
        self.declined_for_good = False

    @property
    def graph(self) -> torch.fx.Graph:
        return self.index.graph

    @property
    def output(self) -> torch.fx.Node:
        """The only output of a pattern with one."""
        (node,) = self.outputs
        return node

    def value(self, name: str) -> Any:
        """What a capture is: a fake tensor for a node, and a constant for a constant."""
        return fake_value(self.captures[name])

    def decline(self, reason: str, *, for_good: bool = False) -> bool:
        """For checks to return: False, with a reason that ``explain_match`` shows.

        Where operators commute, a place may be read in several ways, and the next is tried; ``for_good`` spares that.
        """
        self.declined = reason
        self.declined_for_good = for_good
        return False

    def replace_by_example(
        self, function: Callable[..., Any], args: Sequence[Any], *, trace: Tracer = fwd_only
    ) -> None:
        """Put ``function`` of ``args`` (nodes and constants) in place of the match.

        It is traced at the fake tensors of the nodes, and must return as many values as the pattern has outputs, of
        the same dtypes and sizes.
        """
        given = {f"argument_{position}": value for position, value in enumerate(args)}
        traced = trace(function, list(given), [fake_value(value) for value in args])
        self.replace_with_graph(traced.graph_module, [given[name] for name in traced.arguments])

    def replace_with_graph(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[torch.fx.Node],
        *,
        chosen: Sequence[int] | None = None,
    ) -> None:
        """Put a traced graph in place of the match; its results take the place of the match's outputs, in order.

        ``chosen`` are the places of the results that do, where not all of them.
        """
        results = _results(graph_module.graph, chosen)
        if len(results) != len(self.outputs):
            raise PatternError(
                f"The replacement returns {len(results)} values where the pattern has {len(self.outputs)};"
                " return one for each."
            )
        _reject_other_values(self.outputs, results)
        copies = self._copy_in(graph_module.graph, inputs)
        changed: dict[torch.fx.Node, Any] = {}
        taken = {memory_root(value) for value in inputs}
        for old, result in zip(self.outputs, results, strict=True):
            new = copies[result]
            own = isinstance(fake_value(new), FakeTensor) and memory_root(old) in self.nodes
            if own and memory_root(new) in taken:
                new = self._copy_of(new)
            taken.add(memory_root(new))
            if not same_metadata(old.meta.get("val"), new.meta.get("val")):
                changed[new] = old.meta.get("val")
            self.index.forget(old.users)
            old.replace_all_uses_with(new)
        self.erase_nodes()
        for node in propagate_strides(self.graph, changed, self.index.results):
            self.index.add(node)
            self.index.forget(node.users)

    def erase_nodes(self) -> None:
        """Take the nodes of the match out of the graph, apart from those others still read."""
        for node in sorted(self.nodes, reverse=True):
            if not node.users and node.op in ("call_function", "call_method"):
                self.graph.erase_node(node)

    def _copy_in(
        self, replacement: torch.fx.Graph, inputs: Sequence[torch.fx.Node]
    ) -> dict[torch.fx.Node, torch.fx.Node]:
        """Copy the nodes of ``replacement``, each to the first place where all it reads is there.

        But not before the match: what they read may be written to up to there.
        """
        placeholders = replacement.find_nodes(op="placeholder")
        copies: dict[torch.fx.Node, torch.fx.Node] = dict(zip(placeholders, inputs, strict=True))
        backward = after_tangents(replacement)
        draws = iter([node for node in self.nodes if is_random(node)])
        start, origin = min(self.nodes).prev, min(self.outputs)
        for node in replacement.nodes:
            if node.op in ("placeholder", "output"):
                continue
            place = max([start, *(copies[source] for source in node.all_input_nodes)])
            if is_random(node):  # no earlier than the draw it stands for: others come before it
                place = max(place, next(draws, place))
            with self.graph.inserting_after(_after_inputs(place)):
                copy = self.graph.node_copy(node, copies.__getitem__)
            self._describe(copy, node, origin, tag="is_backward" if node in backward else "is_forward")
            copies[node] = copy
            self.index.add(copy)
        return copies

    def _copy_of(self, node: torch.fx.Node) -> torch.fx.Node:
        """A copy, made where the match is: a result replaces memory of its own, so it must not be that of an input.

        Where nobody could tell, the copy goes with the other no-ops.
        """
        key, clone = ("val", torch.ops.aten.clone.default) if "val" in node.meta else ("example_value", torch.clone)
        with self.graph.inserting_after(_after_inputs(max(node, min(self.nodes).prev))):
            copy = self.graph.call_function(clone, (node,))
        origin, value = min(self.outputs), fake_value(node)
        self._describe(copy, copy, origin, tag=str(origin.meta.get("partitioner_tag")))
        with value.fake_mode, torch.no_grad():
            copy.meta[key] = value.clone()
        self.index.add(copy)
        return copy

    def _describe(self, copy: torch.fx.Node, traced: torch.fx.Node, origin: torch.fx.Node, *, tag: str) -> None:
        copy.meta = {key: origin.meta[key] for key in _KEPT_META if key in origin.meta}
        for key in VALUE_KEYS:
            if key in traced.meta:
                copy.meta[key] = traced.meta[key]
        copy.meta["replaced"] = tuple(node.name for node in self.nodes)
        if "partitioner_tag" in origin.meta:
            copy.meta["partitioner_tag"] = tag


def _reject_other_values(outputs: Sequence[torch.fx.Node], results: Sequence[Any]) -> None:
    for position, (old, new) in enumerate(zip(outputs, results, strict=True)):
        differing = described_where_different(fake_value(old), fake_value(new))
        if differing is not None:
            before, after = differing
            raise PatternError(
                f"The replacement's result {position} is {after} where the pattern has {before}; return the same dtype"
                " and sizes."
            )


def described_where_different(left: Any, right: Any) -> tuple[str, str] | None:
    """The dtypes and sizes of two fake tensors as text; None where they are the same."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return None
    if left.dtype == right.dtype and same_sizes(left, right):
        return None
    return f"{left.dtype} of {list(left.shape)}", f"{right.dtype} of {list(right.shape)}"


def _results(graph: torch.fx.Graph, chosen: Sequence[int] | None) -> list[Any]:
    """The values a traced graph returns, without gradients that do not exist."""
    results: Any = graph.output_node().args[0]
    if chosen is not None and max(chosen) < len(results):
        results = [results[place] for place in chosen]
    return [value for value in results if value is not None]


def _after_inputs(place: torch.fx.Node) -> torch.fx.Node:
    """``place``, or the last input of the graph where it is one of them: inputs come before everything else."""
    while place.next.op == "placeholder":
        place = place.next
    return place


def fake_value(value: Any) -> Any:
    """The fake tensor or symbolic number of a node, wherever it was traced; a constant is itself."""
    if not isinstance(value, torch.fx.Node):
        return value
    for key in VALUE_KEYS:
        if key in value.meta:
            return value.meta[key]
    raise PatternError(f"Node {value.name} has no fake value; compile the graph through torch.compile.")
