"""Nodes of functional graphs: finding calls, reading their arguments and fake tensors, and replacing them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.fx

from torchkiln.actions import take_rewrite
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.insertion import erase_made
from torchkiln.graph.source import source_line


def calls_of(graph: torch.fx.Graph, *targets: Any) -> list[torch.fx.Node]:
    """The calls of ``targets``, one target after the other, each in graph order."""
    return [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]


def rewrite_each(nodes: Iterable[torch.fx.Node], rewrite: Callable[[torch.fx.Node], bool]) -> bool:
    """Call ``rewrite`` on each of ``nodes``; returns whether one of the calls changed the graph."""
    changed = False
    for node in nodes:
        changed |= take_rewrite(partial(_described, rewrite, node)) and rewrite(node)
    return changed


def replace_each(
    nodes: Iterable[torch.fx.Node], make: Callable[[torch.fx.Node], torch.fx.Node | None]
) -> bool:
    """Let what ``make`` gives for each of ``nodes`` take its place; where it gives None, the node stays."""
    changed = False
    for node in nodes:
        made = make(node) if take_rewrite(partial(_described, make, node)) else None
        if made is not None:
            replace(node, made)
            changed = True
    return changed


def _described(rewrite: Callable[[torch.fx.Node], Any], node: torch.fx.Node) -> tuple[str, str | None]:
    function = rewrite.func if isinstance(rewrite, partial) else rewrite
    return f"{getattr(function, '__name__', 'rewrite').strip('_')} at {node.name}", source_line(node)


def fake_tensor(node: object) -> torch.Tensor | None:
    """The fake value of ``node`` where ``node`` is a node and its value one tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def nodes_in(arguments: Any) -> tuple[torch.fx.Node, ...]:
    """Every node in ``arguments``, in order, as often as it is there."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(arguments, found.append)
    return tuple(found)


@lru_cache(maxsize=4096)
def argument_names(target: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, in order."""
    return tuple(argument.name for argument in target._schema.arguments)


def argument(node: torch.fx.Node, name: str) -> Any:
    """What a call gives its operator as ``name``, or the default; None where there is no such argument."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = argument_names(node.target)
    if name not in names:
        return None
    place = names.index(name)
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, node.target._schema.arguments[place].default_value)


def replace(old: torch.fx.Node, new: torch.fx.Node | Sequence[torch.fx.Node] | Mapping[int, torch.fx.Node]) -> None:
    """Let ``new`` take the place of ``old``, which is erased; several nodes take the place of its results by index."""
    if isinstance(new, torch.fx.Node):
        old.replace_all_uses_with(new)
    else:
        for item in list(old.users):
            index: Any = item.args[1]
            assert item.target is operator.getitem
            replace(item, new[index])
    old.graph.erase_node(old)


def replace_if_alike(old: torch.fx.Node, made: Sequence[torch.fx.Node]) -> bool:
    """Let the last of ``made`` take the place of ``old`` where their fake values look the same.

    Otherwise the nodes ``made``, given in the order they were inserted, are erased.
    """
    if not made or not same_metadata(made[-1].meta.get("val"), old.meta.get("val")):
        erase_made(made)
        return False
    replace(old, made[-1])
    return True


def unused_attribute(module: torch.fx.GraphModule, prefix: str) -> str:
    """A name that begins with ``prefix`` and that ``module`` does not have yet."""
    return next(name for number in itertools.count() if not hasattr(module, name := f"{prefix}{number}"))
