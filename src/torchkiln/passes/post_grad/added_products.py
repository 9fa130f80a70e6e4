"""A product and the addition after it: one call of the library (``addmm``, ``baddbmm``), or a product and a kernel.

An addition costs nothing in a kernel that reads the product anyway, while the library fills the result with the addend
first, in a call of its own. In microseconds (float32, M x K x N, the second matrix transposed), one thread and two:

| | 32 x 64 x 64 | 256 x 64 x 64 | 1024 x 64 x 64 | 512 x 256 x 256 | 1024 x 256 x 1024 |
|---|---|---|---|---|---|
| relu(mm + b) | 4.2, 3.9 | 20, 16 | 76, 43 | 574, 305 | 5101, 2352 |
| relu(addmm) | 7.1, 6.6 | 26, 23 | 90, 52 | 607, 333 | 5361, 2619 |
| mm + b | 4.2, 3.9 | 20, 17 | 75, 43 | 575, 301 | 5096, 2403 |
| addmm | 6.7, 6.3 | 24, 22 | 81, 47 | 530, 318 | 4907, 2557 |

So the two are one call only where nothing but torch's operators, or the caller, reads a large sum. Of ``addmm`` with a
vector, which is what ``Linear`` is, the addition is taken out by the same rule. Half precision stays as it is: eager
rounds the product before the addition, ``addmm`` does not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import is_row_major, is_symbolic, same_metadata, update_fake_values

_aten = torch.ops.aten

_WITH_ADDEND = {_aten.mm.default: _aten.addmm.default, _aten.bmm.default: _aten.baddbmm.default}
_DTYPES = (torch.float32, torch.float64)
# Elements of a sum from which on the library's call costs no more than a product and a kernel.
_MANY = 2**18


def add_in_products(graph_module: torch.fx.GraphModule) -> bool:
    """Decide for every product with an addition, whichever way it is written."""
    changed = _take_out_additions(graph_module)
    return _put_in_additions(graph_module) or changed


def _take_out_additions(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    changed = False
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        if not _adds_vector(node) or _is_worth_one_call(node):
            continue
        addend, left, right = node.args
        with graph.inserting_before(node):
            product = graph.call_function(_aten.mm.default, (left, right))
            total = graph.call_function(_aten.add.Tensor, (product, addend))
        product.meta = dict(node.meta)
        total.meta = dict(node.meta)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        changed = True
    return changed


def _adds_vector(node: torch.fx.Node) -> bool:
    """Whether ``node`` is the sum of a product and a vector, neither of them scaled, with eager's layout of both."""
    total = node.meta.get("val")
    if node.kwargs or len(node.args) != 3 or not isinstance(total, torch.Tensor) or total.dtype not in _DTYPES:
        return False
    addend, left, right = (arg.meta.get("val") if isinstance(arg, torch.fx.Node) else None for arg in node.args)
    if not all(isinstance(v, torch.Tensor) and v.dtype == total.dtype for v in (addend, left, right)):
        return False
    assert isinstance(addend, torch.Tensor)
    # A new result of ``mm`` has contiguous rows; so has the sum of one and a vector.
    return addend.dim() == 1 and addend.device.type == "cpu" and is_row_major(total)


def _is_worth_one_call(total: torch.fx.Node) -> bool:
    """Whether the sum of a product of two matrices, or of stacks of them, and an addend is better left to torch."""
    value = total.meta["val"]
    small = value.dim() == 2 and not is_symbolic(value) and value.numel() < _MANY
    return not small and _is_read_by_torch(total)


def _put_in_additions(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    if not any(graph.find_nodes(op="call_function", target=target) for target in _WITH_ADDEND):
        return False
    changed = False
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        operands = _product_and_addend(node)
        if operands is None or not _is_worth_one_call(node):
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


def _is_read_by_torch(node: torch.fx.Node) -> bool:
    """Whether no loop of ours reads ``node``, which could do the addition on the way."""
    from torchkiln.lowering import LOWERINGS  # lowering is the stage after this one

    return all(
        _is_read_by_torch(user)
        if view_source(user) is not None
        else user.op == "output" or user.target not in LOWERINGS
        for user in node.users
    )
