"""Masks drawn into memory that is not row-major, as ``torch.empty_like(x).bernoulli_(p)`` does in alpha dropout.

Eager draws in the order of memory. Made functional, the operator draws in row-major order, so it is applied to the
memory seen in its own order, and the result is turned back.
"""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.graph.fake import is_symbolic, update_fake_values
from torchkiln.graph.operators import Kind, kind_of

_aten = torch.ops.aten


def is_eager(settings: Settings) -> bool:
    """Whether random numbers are to be those eager draws."""
    return settings.rng == "eager"


def draw_in_memory_order(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    changed = False
    for node in list(graph.find_nodes(op="call_function", target=_aten.bernoulli.p)):
        memory = node.args[0]
        order = _order_of_empty(memory) if isinstance(memory, torch.fx.Node) else None
        if order is None:
            continue
        inverse = sorted(range(len(order)), key=order.__getitem__)
        with graph.inserting_before(node):
            seen = graph.call_function(_aten.permute.default, (memory, order))
            drawn = graph.call_function(_aten.bernoulli.p, (seen, *node.args[1:]), dict(node.kwargs))
            back = graph.call_function(_aten.permute.default, (drawn, inverse))
            # With the strides the graph was traced with: nothing after this must change.
            result = graph.call_function(_aten.clone.default, (back,), {"memory_format": torch.contiguous_format})
        for made in (seen, drawn, back, result):
            made.meta = {key: item for key, item in node.meta.items() if key not in ("val", "tensor_meta")}
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        changed = True
    if changed:
        update_fake_values(graph_module)
    return changed


def _order_of_empty(node: torch.fx.Node) -> list[int] | None:
    """Dimensions by stride, of memory made for the purpose and not row-major; None for any other."""
    value = node.meta.get("val")
    if kind_of(node.target) is not Kind.UNINITIALIZED or not isinstance(value, torch.Tensor):
        return None
    if is_symbolic(value) or value.is_contiguous():
        return None
    strides = value.stride()
    order = sorted(range(len(strides)), key=lambda k: -strides[k])
    return order if value.permute(order).is_contiguous() else None
