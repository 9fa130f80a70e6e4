"""New nodes of functional graphs: what they inherit, their fake values, and their arguments for symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx

from torchkiln.graph import program_memory
from torchkiln.graph.fake import computing_with, fake_mode_of
from torchkiln.graph.fake_kernels import fake_kernel
from torchkiln.graph.tangents import is_tangent

_NOT_INHERITED = frozenset(
    {"val", "tensor_meta", "example_value", "unbacked_bindings", "eager_arguments", program_memory.NOTED}
)


def insert_call(before: torch.fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call of ``target`` right before a node, which it is made for: it has the node's source line and part of the
    graph, and a fake value of its own where its arguments have theirs.
    """
    made = _inserted(before, target, args, kwargs)
    mode = fake_mode_of(before.graph)
    if mode is not None and all("val" in source.meta for source in made.all_input_nodes):
        # At once, as the graph may lose the last value that knows the mode.
        given, named = torch.fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        with computing_with(mode):
            made.meta["val"] = fake_kernel(target)(*given, **named)
    return made


def insert_known(
    before: torch.fx.Node, value: Any, target: Callable[..., Any], *args: Any, **kwargs: Any
) -> torch.fx.Node:
    """As :func:`insert_call` where the fake value is known.

    Of symbolic sizes, torch takes milliseconds to make one, and writes sizes in other ways than they were before.
    """
    made = _inserted(before, target, args, kwargs)
    made.meta["val"] = value
    return made


def _inserted(
    before: torch.fx.Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.fx.Node:
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args, kwargs)
    made.meta = inherited(before)
    return made


def inherited(origin: torch.fx.Node) -> dict[str, Any]:
    """The metadata that a node made for, or in place of, ``origin`` has of it: not what is said of its value."""
    return {key: item for key, item in origin.meta.items() if key not in _NOT_INHERITED}


def erase_made(nodes: Iterable[torch.fx.Node]) -> None:
    """Erase inserted nodes that are of no use, given in the order they were inserted."""
    for node in reversed(list(nodes)):
        node.graph.erase_node(node)


class SizeArguments:
    """What to write where an operator of one graph takes a size: a number, or the node that has it.

    Looks at the graph once; sizes that only nodes made later have are not found.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._position = {node: place for place, node in enumerate(graph.nodes)}
        self._numbers: dict[Any, torch.fx.Node] = {}
        self._dimensions: dict[Any, tuple[torch.fx.Node, int]] = {}
        for node in self._position:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self._numbers.setdefault(value.node.expr, node)
            elif isinstance(value, torch.Tensor) and node.op == "placeholder" and not is_tangent(node):
                sizes: tuple[Any, ...] = tuple(value.shape)
                for dim, size in enumerate(sizes):
                    if isinstance(size, torch.SymInt):
                        self._dimensions.setdefault(size.node.expr, (node, dim))

    def argument(self, size: Any, before: torch.fx.Node) -> Any:
        """``size`` as an argument for a node made before ``before``; None when nothing there has it."""
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        node = self._numbers.get(expression)
        if node is not None and self._position[node] < self._position[before]:
            return node
        if expression in self._dimensions:
            source, dim = self._dimensions[expression]
            return insert_call(before, torch.ops.aten.sym_size.int, source, dim)
        return None

    def arguments(self, shape: Iterable[Any], before: torch.fx.Node) -> list[Any] | None:
        """Every size of ``shape``, or None when one of them is not to be had."""
        found = [self.argument(size, before) for size in shape]
        return None if any(item is None for item in found) else found
