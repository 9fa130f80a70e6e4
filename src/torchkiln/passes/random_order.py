"""Masks drawn into memory that is not row-major, as ``torch.empty_like(x).bernoulli_(p)`` does in alpha dropout.

Eager draws in the order of memory. Made functional, the operator draws in row-major order, so it is applied to the
memory permuted to its own order, and the result is permuted back.
"""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.graph.fake import is_symbolic, memory_order
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor, replace
from torchkiln.graph.operators import Kind, kind_of

_aten = torch.ops.aten


def is_eager(settings: Settings) -> bool:
    """Whether random numbers are to be those eager draws."""
    return settings.rng == "eager"


def draw_in_memory_order(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in calls_of(graph_module.graph, _aten.bernoulli.p):
        order = _order_of_empty(node.args[0])
        if order is None:
            continue
        inverse = sorted(range(len(order)), key=order.__getitem__)
        memory = insert_call(node, _aten.permute.default, node.args[0], order)
        drawn = insert_call(node, _aten.bernoulli.p, memory, *node.args[1:], **node.kwargs)
        back = insert_call(node, _aten.permute.default, drawn, inverse)
        # With the strides the graph was traced with: nothing after this must change.
        replace(node, insert_call(node, _aten.clone.default, back, memory_format=torch.contiguous_format))
        changed = True
    return changed


def _order_of_empty(node: object) -> list[int] | None:
    """Dimensions by stride, of memory made for the purpose and not row-major; None for any other."""
    value = fake_tensor(node)
    if value is None or kind_of(getattr(node, "target", None)) is not Kind.UNINITIALIZED:
        return None
    if is_symbolic(value) or value.is_contiguous():
        return None
    order = memory_order(value)
    return order if value.permute(order).is_contiguous() else None
