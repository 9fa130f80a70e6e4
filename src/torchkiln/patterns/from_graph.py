"""Patterns from graphs: the trace of a search function as an expression."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.fx

from torchkiln.errors import PatternError
from torchkiln.graph.fake import SYMBOLIC
from torchkiln.patterns.arguments import argument_form
from torchkiln.patterns.expressions import IGNORED, Call, Capture, Dimension, Outputs
from torchkiln.patterns.index import seen_through
from torchkiln.patterns.tracing import Traced

# Constants of these types depend on the inputs of the example. Floats may be fractions such as a scale 1 / sqrt(size).
_OF_THE_EXAMPLE = (int, float, *SYMBOLIC, torch.dtype, torch.device, torch.layout)


def pattern_of(
    traced: Traced,
    *,
    loose: bool,
    scalars: Mapping[str, float | int] | None = None,
    exclusive: Collection[str] = (),
) -> Call | Outputs:
    """The expression that ``traced`` matches itself.

    A ``loose`` one leaves out what depends on the inputs of the example: numbers, dtypes and devices match any, and
    changes of layout are skipped, to be matched with ``through="layout"``. An argument ``dim`` is kept for tensors of
    the rank it has in the example: a search function that chooses it by sizes is not found where it would choose
    another. Constants equal to one of ``scalars`` are captured under its name.
    """
    writer = _Writer(loose, {value: name for name, value in (scalars or {}).items()}, exclusive)
    inputs = iter(traced.arguments)
    for node in traced.graph_module.graph.nodes:
        if node.op == "placeholder":
            writer.add_input(node, next(inputs))
        elif node.op == "call_function":
            writer.add_call(node)
        elif node.op == "get_attr":
            raise PatternError("A search function may not use a tensor of its own; pass it as an argument instead.")
    results = results_of(traced)
    roots = dict.fromkeys(writer.expressions[results[place]] for place in distinct_results(traced))
    if not roots or not all(isinstance(root, Call) for root in roots):
        raise PatternError("A search function may not return an argument unchanged; return what it computes only.")
    return Outputs(*roots) if len(roots) > 1 else next(iter(roots))


class _Writer:
    """Makes the expressions of one graph, node by node; ``names`` are those of the scalars by value."""

    def __init__(self, loose: bool, names: Mapping[float | int, str], exclusive: Collection[str]) -> None:
        self.expressions: dict[torch.fx.Node, Any] = {}
        self._loose, self._names, self._exclusive = loose, names, exclusive

    def add_input(self, node: torch.fx.Node, name: str) -> None:
        value = node.meta.get("val")
        rank = value.ndim if self._loose and isinstance(value, torch.Tensor) else None
        self.expressions[node] = Capture(name, exclusive=name in self._exclusive, rank=rank)

    def add_call(self, node: torch.fx.Node) -> None:
        source = seen_through(node, "layout") if self._loose else None
        if source is not None:
            self.expressions[node] = self.expressions[source]
            return
        args = [self._argument(value) for value in node.args]
        if self._loose:
            _keep_dimension(node, args)
        call = Call(node.target)
        call.args, call.kwargs = tuple(args), {key: self._argument(value) for key, value in node.kwargs.items()}
        self.expressions[node] = call

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            symbolic = isinstance(value.meta.get("val"), SYMBOLIC)
            return self._constant(value.meta["val"]) if symbolic else self.expressions[value]
        if isinstance(value, (list, tuple)):
            items = [self._argument(item) for item in value]
            # The rank of a view may differ between the example and the match.
            return IGNORED if items and all(item is IGNORED for item in items) else items
        return value if isinstance(value, bool) else self._constant(value)

    def _constant(self, value: Any) -> Any:
        if isinstance(value, (int, float)) and value in self._names:
            name = self._names[value]
            return Capture(name, exclusive=name in self._exclusive)
        return IGNORED if self._loose and isinstance(value, _OF_THE_EXAMPLE) else value


def _keep_dimension(node: torch.fx.Node, args: list[Any]) -> None:
    """Put the dimension an operator works along into its converted arguments, where it was left out as a number."""
    names = argument_form(node.target).names
    if "dim" not in names[: len(args)] or not isinstance(node.args[0], torch.fx.Node):
        return
    place = names.index("dim")
    number, value = node.args[place], node.args[0].meta.get("val")
    if args[place] is IGNORED and isinstance(number, int) and isinstance(value, torch.Tensor) and value.ndim:
        args[place] = Dimension(number, value.ndim)


def results_of(traced: Traced) -> list[Any]:
    """What the function returns, in order: nodes, and None for a gradient that does not exist."""
    results = traced.graph_module.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return list(results)


def distinct_results(traced: Traced) -> tuple[int, ...]:
    """The places of results that are values of their own: two gradients may be one and the same value."""
    first: dict[torch.fx.Node, int] = {}
    for place, node in enumerate(results_of(traced)):
        if isinstance(node, torch.fx.Node):
            first.setdefault(node, place)
    return tuple(first.values())
