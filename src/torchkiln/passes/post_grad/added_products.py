"""A product and the addition after it: in one call of the library, or with what reads the sum.

An addition costs nothing in a kernel that reads the product anyway, while the library fills the result with the addend
first. With one thread, in microseconds (float32, M x K x N):

| | 4096 x 64 x 64 | 2048 x 256 x 256 | 64 x 768 x 768 |
|---|---|---|---|
| relu(mm + b) | 375 | 2257 | 544 |
| relu(addmm) | 436 | 2461 | 569 |
| mm + b | 383 | 2263 | 559 |
| addmm | 368 | 2261 | 563 |

So the two become one (``addmm`` for ``mm``, ``baddbmm`` for ``bmm``) where nothing but torch's operators, or the
caller, reads the sum: there it saves a kernel. And ``addmm`` becomes two where nothing but kernels reads it.
Half precision stays as it is: eager rounds the product before the addition of ``mm`` and a sum, that of ``addmm`` not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import is_symbolic, same_metadata, update_fake_values
from torchkiln.graph.insertion import erase_made, insert_call

_aten = torch.ops.aten

_WITH_ADDEND = {_aten.mm.default: _aten.addmm.default, _aten.bmm.default: _aten.baddbmm.default}
_DTYPES = (torch.float32, torch.float64)


def add_in_products(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    changed = _take_out_addends(graph)
    products = any(graph.find_nodes(op="call_function", target=target) for target in _WITH_ADDEND)
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor) if products else ():
        operands = _product_and_addend(node)
        if operands is None or not _is_read_by_torch(node):
            continue
        product, addend = operands
        with graph.inserting_before(node):
            call = graph.call_function(_WITH_ADDEND[product.target], (addend, *product.args))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
        graph.erase_node(product)
        changed = True
    if changed:
        update_fake_values(graph_module)
    return changed


def _take_out_addends(graph: torch.fx.Graph) -> bool:
    changed = False
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        value = node.meta.get("val")
        addend, *factors = node.args
        if node.kwargs or not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES or is_symbolic(value):
            continue
        if value.device.type != "cpu" or not _is_read_by_loops(node):
            continue
        product = insert_call(node, _aten.mm.default, *factors)
        total = insert_call(node, _aten.add.Tensor, product, addend)
        if not same_metadata(total.meta.get("val"), value):
            erase_made([product, total])
            continue
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        changed = True
    return changed


def _product_and_addend(node: torch.fx.Node) -> tuple[Any, torch.fx.Node] | None:
    if node.kwargs or len(node.args) != 2:
        return None
    for product, addend in (node.args, node.args[::-1]):
        if not isinstance(product, torch.fx.Node) or not isinstance(addend, torch.fx.Node):
            return None
        if product.target in _WITH_ADDEND and len(product.users) == 1 and _may_be_added(product, addend, node):
            return product, addend
    return None


def _may_be_added(product: torch.fx.Node, addend: torch.fx.Node, total: torch.fx.Node) -> bool:
    """Whether the library adds what eager adds: floats of one dtype, the addend no larger than the product."""
    left, right, result = (n.meta.get("val") for n in (product, addend, total))
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor) or left.dtype not in _DTYPES:
        return False
    if left.dtype != right.dtype or not same_metadata(left, result):
        return False
    if is_symbolic(right) and right.dim() != 1:
        return False
    sizes = zip(reversed(right.shape), reversed(left.shape), strict=False)
    if right.dim() == 1:  # of that length, or torch had not added it
        return not isinstance(right.shape[0], int) or right.shape[0] != 1
    return right.dim() <= left.dim() and right.dim() > 0 and all(a == b for a, b in sizes if isinstance(b, int))


def _is_read_by_loops(node: torch.fx.Node) -> bool:
    """Whether every reader of ``node``, through views, is a loop of ours, which does the addition on the way."""
    from torchkiln.lowering import LOWERINGS  # lowering is the stage after this one

    return bool(node.users) and all(
        _is_read_by_loops(user) if view_source(user) is not None else user.target in LOWERINGS for user in node.users
    )


def _is_read_by_torch(node: torch.fx.Node) -> bool:
    """Whether no loop of ours reads ``node``, which could do the addition on the way."""
    from torchkiln.lowering import LOWERINGS  # lowering is the stage after this one

    return all(
        _is_read_by_torch(user)
        if view_source(user) is not None
        else user.op == "output" or user.target not in LOWERINGS
        for user in node.users
    )
