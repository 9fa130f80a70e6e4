"""Tangents: the gradients of results that autograd gives backward, known by what AOTAutograd says of its inputs."""

from __future__ import annotations

import torch.fx
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    PhiloxBackwardBaseOffsetAOTInput,
    PhiloxBackwardSeedAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an input of a joint or backward graph that autograd gives backward.

    Parts and sizes of a gradient that is a tensor subclass count, and so do tokens, which come in the same list.
    """
    return node.op == "placeholder" and isinstance(_described(node), (TangentAOTInput, BackwardTokenAOTInput))


def is_random_state_of_backward(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an input that torch's functional random numbers of backward start from."""
    return isinstance(_described(node), (PhiloxBackwardSeedAOTInput, PhiloxBackwardBaseOffsetAOTInput))


def mark_tangent(node: torch.fx.Node, position: int) -> None:
    """Say that an input of a joint graph is the gradient of result ``position``, as AOTAutograd says it."""
    node.meta["desc"] = TangentAOTInput(PlainAOTOutput(position))


def after_tangents(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The tangents of a joint graph and what is computed from them."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _described(node: torch.fx.Node) -> object:
    """What an input is, or what it is a part or a size of."""
    described: object = node.meta.get("desc")
    while (whole := getattr(described, "base", None)) is not None:
        described = whole
    return described
