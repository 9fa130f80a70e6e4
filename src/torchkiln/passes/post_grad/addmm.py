"""A product and the addition after it: in one call of the library, or with what reads the sum.

An addition costs nothing in a kernel that reads the product anyway, while the library fills the result with the addend
first, in a call of its own. In microseconds (float32, M x K x N, the second matrix transposed), one thread and two:

| | 32 x 64 x 64 | 256 x 64 x 64 | 1024 x 64 x 64 | 512 x 256 x 256 | 1024 x 256 x 1024 |
|---|---|---|---|---|---|
| relu(mm + b) | 4.2, 3.9 | 20, 16 | 76, 43 | 574, 305 | 5101, 2352 |
| relu(addmm) | 7.1, 6.6 | 26, 23 | 90, 52 | 607, 333 | 5361, 2619 |
| mm + b | 4.2, 3.9 | 20, 17 | 75, 43 | 575, 301 | 5096, 2403 |
| addmm | 6.7, 6.3 | 24, 22 | 81, 47 | 530, 318 | 4907, 2557 |

So the two become one (``addmm`` for ``mm``, ``baddbmm`` for ``bmm``) where nothing but torch's operators, or the
caller, reads a sum of many elements: there it saves a kernel. And ``addmm`` becomes two where nothing but kernels reads
it, or it is small.
Half precision stays as it is: eager rounds the product before the addition of ``mm`` and a sum, that of ``addmm`` not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import expression, has_one_dtype, is_symbolic, same_metadata, typical, update_fake_values
from torchkiln.graph.insertion import erase_made, insert_call
from torchkiln.graph.operators import becomes_loop

_aten = torch.ops.aten

_WITH_ADDEND = {_aten.mm.default: _aten.addmm.default, _aten.bmm.default: _aten.baddbmm.default}
_DTYPES = (torch.float32, torch.float64)
# Elements of a sum from which on the library's call costs no more than a product and a kernel.
_MANY = 2**18


def add_in_products(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    changed = _take_out_addends(graph)
    products = any(graph.find_nodes(op="call_function", target=target) for target in _WITH_ADDEND)
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor) if products else ():
        operands = _product_and_addend(node)
        if operands is None or _is_small(node.meta["val"]) or not _is_read_by_torch(node):
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
        if node.kwargs or not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES or not has_one_dtype(node):
            continue
        if is_symbolic(value) and not _is_row(addend, value):
            continue
        if value.device.type != "cpu" or not (_is_small(value) or _is_read_by_loops(node)):
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


def _is_small(total: torch.Tensor) -> bool:
    """Whether ``total`` is a matrix of so few elements that adding them costs less than the library's call for it.

    Symbolic sizes are taken for those of the example: either way is right at any size.
    """
    return total.dim() == 2 and typical(total.shape[0]) * typical(total.shape[1]) < _MANY


def _is_row(addend: Any, total: torch.Tensor) -> bool:
    """Whether ``addend`` is a vector as long as the rows of ``total``, whatever symbolic sizes turn out to be."""
    value = addend.meta.get("val") if isinstance(addend, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return False
    return bool(expression(value.shape[0]) == expression(total.shape[1]))


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
    if left.dtype != right.dtype or not same_metadata(left, result) or not has_one_dtype(product):
        return False
    if is_symbolic(right) and right.dim() != 1:
        return False
    sizes = zip(reversed(right.shape), reversed(left.shape), strict=False)
    if right.dim() == 1:  # of that length, or torch had not added it
        return not isinstance(right.shape[0], int) or right.shape[0] != 1
    return right.dim() <= left.dim() and right.dim() > 0 and all(a == b for a, b in sizes if isinstance(b, int))


def _is_read_by_loops(node: torch.fx.Node) -> bool:
    """Whether every reader of ``node``, through views, is a loop of ours, which does the addition on the way."""
    return bool(node.users) and all(
        _is_read_by_loops(user) if view_source(user) is not None else becomes_loop(user) for user in node.users
    )


def _is_read_by_torch(node: torch.fx.Node) -> bool:
    """Whether no loop of ours reads ``node``, which could do the addition on the way."""
    return all(
        _is_read_by_torch(user) if view_source(user) is not None else not becomes_loop(user) for user in node.users
    )
