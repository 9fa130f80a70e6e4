"""Is eager the same twice? A program that differs from itself, or reads memory that nobody wrote, cannot be judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx
from torch.utils._python_dispatch import TorchDispatchMode

from torchkiln.debug.accuracy import Expected, divergence, first_divergence
from torchkiln.debug.first_node import node_values
from torchkiln.debug.runs import interpreted, reference_of, results_of
from torchkiln.graph.source import source_line

aten = torch.ops.aten
_ALLOCATIONS = (
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)


class _Poisoned(TorchDispatchMode):
    """Memory that nobody wrote holds NaN, True, or a number that is unlikely to be there."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **dict(kwargs or {}))
        if getattr(func, "overloadpacket", None) in _ALLOCATIONS and made.layout is torch.strided:
            made.fill_(float("nan") if made.is_floating_point() or made.is_complex() else 101)
        return made


def self_difference(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], first: Expected, *, gradients: bool
) -> str | None:
    """How another run of a graph differs from its ``first``, as a sentence; None where it is the same twice.

    Where there is a float64 ``reference``, that is run again: rounding hides less in it.
    """
    program = interpreted(graph_module)
    before = first.eager if first.reference is None else first.reference
    try:
        with _Poisoned():
            if first.reference is not None:
                again = reference_of(program, inputs, gradients=gradients)
            else:
                again = results_of(program, inputs, gradients=gradients)
    except Exception:  # such as an operator with a body, which a mode stops
        return None
    found = None if again is None else first_divergence(again, Expected(before))
    if found is None:
        return None
    node = _first_node(graph_module, inputs, wide=first.reference is not None)
    if node is None:
        return f"eager differs from itself in {found.what}"
    line = source_line(node)
    return f"eager differs from itself, first at node {node.name}" + (f" ({line})" if line else "")


def _first_node(graph_module: torch.fx.GraphModule, inputs: Sequence[Any], *, wide: bool) -> torch.fx.Node | None:
    """Of runs as they are, or else of one in which memory that nobody wrote is poisoned."""
    other_runs: tuple[AbstractContextManager[Any], ...] = (nullcontext(), _Poisoned())
    nodes: list[torch.fx.Node] = list(graph_module.graph.nodes)
    try:
        first = node_values(graph_module, inputs, wide=wide)
        for other in other_runs:
            with other:
                second = node_values(graph_module, inputs, wide=wide)
            for node in nodes:
                if node.name not in second or _allocates(node):
                    continue
                if divergence(node.name, second[node.name], first[node.name], None) is not None:
                    return node
    except Exception:  # a node that does not run by itself
        return None
    return None


def _allocates(node: torch.fx.Node) -> bool:
    return "empty" in getattr(node.target, "__name__", str(node.target))
