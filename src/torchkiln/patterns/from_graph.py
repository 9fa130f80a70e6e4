"""Patterns from graphs: the trace of a search function as an expression."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.fx

from torchkiln.errors import PatternError
from torchkiln.patterns.arguments import argument_form
from torchkiln.patterns.expressions import IGNORED, Call, Capture, Dimension, Outputs
from torchkiln.patterns.matching import seen_through
from torchkiln.patterns.tracing import Traced


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
    names = {value: name for name, value in (scalars or {}).items()}
    expressions: dict[torch.fx.Node, Any] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            if isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return IGNORED if loose else value.meta["val"]
            return expressions[value]
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, float)) and value in names:
            return Capture(names[value], exclusive=names[value] in exclusive)
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):  # fractions such as a scale by 1 / sqrt(size)
            return IGNORED if loose else value
        if loose and isinstance(value, (torch.dtype, torch.device, torch.layout)):
            return IGNORED
        if isinstance(value, (list, tuple)):
            items = [convert(item) for item in value]
            # The rank of a view may differ between the example and the match.
            return IGNORED if items and all(item is IGNORED for item in items) else items
        return value

    inputs = iter(traced.arguments)
    for node in traced.graph_module.graph.nodes:
        if node.op == "placeholder":
            name = next(inputs)
            value = node.meta.get("val")
            rank = value.ndim if loose and isinstance(value, torch.Tensor) else None
            expressions[node] = Capture(name, exclusive=name in exclusive, rank=rank)
        elif loose and seen_through(node, "layout") is not None:
            expressions[node] = expressions[node.args[0]]
        elif node.op == "call_function":
            args = [convert(value) for value in node.args]
            kwargs = {key: convert(value) for key, value in node.kwargs.items()}
            if loose:
                _keep_dimension(node, args)
            call = Call(node.target)
            call.args, call.kwargs = tuple(args), kwargs
            expressions[node] = call
        elif node.op == "get_attr":
            raise PatternError("A search function may not use a tensor of its own; pass it as an argument instead.")
    roots = dict.fromkeys(expressions[results_of(traced)[place]] for place in distinct_results(traced))
    if not roots or not all(isinstance(root, Call) for root in roots):
        raise PatternError("A search function may not return an argument unchanged; return what it computes only.")
    return Outputs(*roots) if len(roots) > 1 else next(iter(roots))


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
