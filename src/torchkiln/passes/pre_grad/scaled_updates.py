"""``addcmul_`` and ``addcdiv_`` with a value, which Dynamo takes apart, put together again.

From torch 2.13 on, ``w.addcdiv_(a, b, value=v)`` is captured as ``w.copy_(fma(a / b, v, w))``. Eager rounds ``v * a``
first and divides that: with v = 0.37, 865 of 4096 elements come out one bit apart. The product and the sum go back into
one call where nobody else reads them and nothing they read is written in between. A value that is a tensor stays one,
where eager reads it as a number: it is multiplied into the first operand, in eager's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from torchkiln.graph.captured_calls import add_call, is_call, operand, tensor_of
from torchkiln.graph.captured_memory import Memory

_WHOLE: Mapping[Any, str] = MappingProxyType({torch.mul: "addcmul_", torch.div: "addcdiv_"})


def join_scaled_updates(graph_module: torch.fx.GraphModule) -> bool:
    copies = graph_module.graph.find_nodes(op="call_method", target="copy_")
    memory = Memory(graph_module) if copies else None
    changed = False
    for copy in copies:
        assert memory is not None
        changed |= _join(graph_module, memory, copy)
    return changed


def _join(graph_module: torch.fx.GraphModule, memory: Memory, copy: torch.fx.Node) -> bool:
    target, total = operand(copy), operand(copy, 1)
    if len(copy.args) != 2 or copy.kwargs or target is None or total is None or not _is_sum(total):
        return False
    product, value = operand(total), total.args[1]
    if operand(total, 2) is not target or product is None or len(total.users) != 1 or len(product.users) != 1:
        return False
    name = _WHOLE.get(product.target) if product.op == "call_function" else None
    left, right = operand(product), operand(product, 1)
    if name is None or left is None or right is None or product.kwargs or len(product.args) != 2:
        return False
    values = (tensor_of(graph_module, node) for node in (target, left, right))
    types = {None if tensor is None else tensor.dtype for tensor in values}
    only = next(iter(types))
    # Of integers, eager has no division and Dynamo's spelling has one; of several types, the sum has another.
    if len(types) != 1 or only is None or not only.is_floating_point:
        return False
    if not memory.steady or not memory.undisturbed((target, left, right), product, copy):
        return False
    keywords: dict[str, Any] = {"value": value}
    if isinstance(value, torch.fx.Node):
        factor = tensor_of(graph_module, value)
        if factor is not None:
            if factor.dim() or not factor.is_floating_point() or factor.requires_grad:
                return False
            if not memory.undisturbed((value,), total, copy):
                return False
            left, keywords = add_call(copy, torch.mul, (left, value)), {}
            memory.stands_for(left, product)
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    with graph_module.graph.inserting_before(copy):
        whole = graph_module.graph.call_method(name, (target, left, right), keywords)
    whole.meta = dict(copy.meta)
    memory.stands_for(whole, copy)
    copy.replace_all_uses_with(whole)
    for node in (copy, total, product):
        graph_module.graph.erase_node(node)
    return True


def _is_sum(node: torch.fx.Node) -> bool:
    """Whether ``node`` is a call of torch's ``fma(a, b, c)``, an operator that is there only once Dynamo needed it."""
    packet = getattr(torch.ops.prims, "fma", None)
    return packet is not None and is_call(node, packet.default) and len(node.args) == 3
