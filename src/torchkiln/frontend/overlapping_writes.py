"""Writes into a tensor of which several elements are one place in memory, such as an expanded one.

Eager refuses them. Making a graph functional gives them some meaning instead, so they are looked for before that: the
graph is not compiled, and run eagerly it raises eager's own error at the user's line.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

from torchkiln.errors import UnsupportedError
from torchkiln.graph.source import blame

# In name only: what they change is not the elements.
_METADATA = frozenset(
    {
        *("as_strided_", "detach_", "requires_grad_", "rename_", "resize_", "resize_as_", "set_", "share_memory_"),
        *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
    }
)
_IN_PLACE = frozenset(
    {
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
        *(operator.ipow, operator.iand, operator.ior, operator.ixor, operator.setitem),
    }
)


def reject_overlapping_writes(graph_module: torch.fx.GraphModule) -> None:
    """Raise UnsupportedError, naming the node, where the captured graph writes into overlapping elements."""
    for node in graph_module.graph.nodes:
        target = node.args[0] if _writes(node) and node.args else None
        if not isinstance(target, torch.fx.Node):
            continue
        value = target.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and _overlaps(value):
            with blame(node):
                raise UnsupportedError("a write into a tensor of which several elements are one place in memory")


def _writes(node: torch.fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _IN_PLACE
    if node.op != "call_method":
        return False
    name = str(node.target)
    return name.endswith("_") and not name.endswith("__") and name not in _METADATA


def _overlaps(value: torch.Tensor) -> bool:
    # Symbolic strides are not asked: their answer would become a guard.
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for stride, size in zip(value.stride(), value.shape, strict=True)
    )
