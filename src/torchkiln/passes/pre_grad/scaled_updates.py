"""``addcmul_`` and ``addcdiv_`` with a value, which Dynamo decomposes, as one call again.

From torch 2.13 on, ``w.addcdiv_(a, b, value=v)`` is captured as ``w.copy_(fma(a / b, v, w))``. Eager rounds ``v * a``
first and divides that: with v = 0.37, 865 of 4096 elements come out one bit apart. The calls are fused where nothing
else reads them and nothing they read is written in between. A value that is a tensor stays one, where eager reads it as
a number: it is multiplied into the first operand, in eager's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.fx

from torchkiln.graph.captured_calls import add_call, is_call, operand
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, rewrite_calls

_IN_PLACE: Mapping[Any, str] = MappingProxyType({torch.mul: "addcmul_", torch.div: "addcdiv_"})


class _Update(NamedTuple):
    """``target.copy_(fma(left * right, value, target))``, or with a division, and the method that does this."""

    method: str
    target: torch.fx.Node
    left: torch.fx.Node
    right: torch.fx.Node
    value: Any
    inner: torch.fx.Node
    fma: torch.fx.Node


def fuse_scaled_updates(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_calls(graph_module, {"copy_"}, _fuse)


def _fuse(graph: CapturedGraph, copy: torch.fx.Node) -> bool:
    found = _read(copy)
    if found is None:
        return False
    method, target, left, right, value, inner, fma = found
    # Of integers, eager has no division and the decomposition has one; of several types, the sum has another.
    dtypes = {None if (tensor := graph.tensor(node)) is None else tensor.dtype for node in (target, left, right)}
    dtype = next(iter(dtypes))
    if len(dtypes) != 1 or dtype is None or not dtype.is_floating_point:
        return False
    if not graph.memory.undisturbed((target, left, right), inner, copy):
        return False
    keywords: dict[str, Any] = {"value": value}
    factor = graph.tensor(value)
    if factor is not None:
        if factor.dim() or not factor.is_floating_point() or factor.requires_grad:
            return False
        if not graph.memory.undisturbed((value,), fma, copy):
            return False
        left, keywords = add_call(copy, torch.mul, (left, value)), {}
        graph.memory.stands_for(left, inner)
    elif not isinstance(value, torch.fx.Node) and type(value) not in (int, float):
        return False
    with copy.graph.inserting_before(copy):
        fused = copy.graph.call_method(method, (target, left, right), keywords)
    fused.meta = dict(copy.meta)
    graph.memory.stands_for(fused, copy)
    copy.replace_all_uses_with(fused)
    for node in (copy, fma, inner):
        copy.graph.erase_node(node)
    return True


def _read(copy: torch.fx.Node) -> _Update | None:
    target, fma = operand(copy), operand(copy, 1)
    # torch has this operator only once Dynamo needed it.
    packet = getattr(torch.ops.prims, "fma", None)
    if packet is None or not is_call(fma, packet.default) or len(fma.args) != 3:
        return None
    inner = operand(fma)
    if len(copy.args) != 2 or copy.kwargs or target is None or operand(fma, 2) is not target or len(fma.users) != 1:
        return None
    if inner is None or inner.op != "call_function" or inner.target not in _IN_PLACE or len(inner.users) != 1:
        return None
    left, right = operand(inner), operand(inner, 1)
    if left is None or right is None or inner.kwargs or len(inner.args) != 2:
        return None
    return _Update(_IN_PLACE[inner.target], target, left, right, fma.args[1], inner, fma)
