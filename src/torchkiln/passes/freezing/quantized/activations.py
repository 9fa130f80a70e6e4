"""Activations behind int8 calls become part of the calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.nodes import argument
from torchkiln.passes.freezing.quantized.calls import (
    POST_OPERATIONS,
    erase_unread,
    fuse_each,
    is_plain,
    reached,
    take_over,
    takes,
)

_aten = torch.ops.aten
Node = torch.fx.Node


@dataclass(frozen=True)
class Activation:
    """A function of one tensor as oneDNN names it. ``inner`` are further nodes that compute it, readers first."""

    source: Node
    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""
    inner: tuple[Node, ...] = ()


def fuse_activations(graph_module: torch.fx.GraphModule) -> bool:
    return fuse_each(graph_module, _fuse)


def _fuse(node: Node) -> bool:
    found = activation(node)
    if found is None:
        return False
    readers = {node, *found.inner}
    source = reached(found.source, last=False)
    chain = (found.source, source.call, *source.between) if source is not None else ()
    if source is None or not readers.issuperset(found.source.users):
        return False
    if any(len(value.users) != 1 for value in chain if value is not found.source):
        return False
    names = POST_OPERATIONS[source.call.target]
    if not takes(source.call, found.name) or not is_plain(source.call):
        return False
    changes: dict[str, Any] = {
        names.name: found.name,
        names.scalars: list(found.scalars),
        names.algorithm: found.algorithm,
    }
    if not take_over(node, source, **changes):
        return False
    erase_unread((*found.inner, *reversed(source.between), source.call))
    return True


def activation(node: Node) -> Activation | None:
    """``node`` as an activation, in the forms that canonicalized graphs have it in."""
    target = node.target
    if target is _aten.div.Tensor:
        return _hardswish(node)
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if target is _aten.relu.default:
        return Activation(source, "relu")
    if target is _aten.clamp.default:
        low, high = argument(node, "min"), argument(node, "max")
        if low == 0 and high is None:
            return Activation(source, "relu")
        return None if low is None or high is None else Activation(source, "hardtanh", (float(low), float(high)))
    if target is _aten.hardswish.default:
        return Activation(source, "hardswish")
    if target is _aten.silu.default:
        return Activation(source, "swish")
    if target is _aten.gelu.default:
        return Activation(source, "gelu", (), argument(node, "approximate"))
    if target is _aten.tanh.default:
        return Activation(source, "tanh")
    if target is _aten.leaky_relu.default:
        return Activation(source, "leaky_relu", (float(argument(node, "negative_slope")),))
    return None


def _hardswish(node: Node) -> Activation | None:
    """``x * clamp(clamp(x + 3, 0), None, 6) / 6``, as torch decomposes it."""
    product: Any = node.args[0]
    divisor = node.args[1]
    if divisor != 6 or not _is(product, _aten.mul.Tensor):
        return None
    source: Any
    upper: Any
    source, upper = product.args
    lower: Any = None
    moved: Any = None
    if _is(upper, _aten.clamp.default) and argument(upper, "max") == 6:
        if argument(upper, "min") is None:
            lower = upper.args[0]
            moved = lower.args[0] if _is(lower, _aten.clamp.default) and _bounds(lower) == (0, None) else None
        elif argument(upper, "min") == 0:
            moved = upper.args[0]
    if not _is(moved, _aten.add.Tensor) or moved.args[0] is not source or moved.args[1] != 3:
        return None
    inner = tuple(part for part in (product, upper, lower, moved) if part is not None)
    if any(len(part.users) != 1 for part in inner):
        return None
    return Activation(source, "hardswish", inner=inner)


def _bounds(clamp: Node) -> tuple[Any, Any]:
    return argument(clamp, "min"), argument(clamp, "max")


def _is(node: Any, target: object) -> bool:
    return isinstance(node, Node) and node.target is target
