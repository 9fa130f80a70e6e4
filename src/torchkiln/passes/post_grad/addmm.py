"""A matmul and the addition after it: as one call of the library, or the addition fused with what reads the sum.

An addition costs nothing in a kernel that reads the matmul anyway, while the library fills the result with the addend
first, in a call of its own. In microseconds (float32, M x K x N, the second matrix transposed), one thread and two:

| | 32 x 64 x 64 | 256 x 64 x 64 | 1024 x 64 x 64 | 512 x 256 x 256 | 1024 x 256 x 1024 |
|---|---|---|---|---|---|
| relu(mm + b) | 4.2, 3.9 | 20, 16 | 76, 43 | 574, 305 | 5101, 2352 |
| relu(addmm) | 7.1, 6.6 | 26, 23 | 90, 52 | 607, 333 | 5361, 2619 |
| mm + b | 4.2, 3.9 | 20, 17 | 75, 43 | 575, 301 | 5096, 2403 |
| addmm | 6.7, 6.3 | 24, 22 | 81, 47 | 530, 318 | 4907, 2557 |

So the two are fused (``addmm`` for ``mm``, ``baddbmm`` for ``bmm``) where only torch's operators or the caller read a
sum of many elements: that saves a kernel. ``addmm`` is decomposed where only kernels read it, or it is small.
Half precision stays as it is: eager rounds the matmul before the addition of ``mm`` and a sum, that of ``addmm`` not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import view_source
from torchkiln.graph.fake import expression, has_one_dtype, is_symbolic, same_metadata, size_hint
from torchkiln.graph.insertion import insert_call, insert_known
from torchkiln.graph.nodes import calls_of, fake_tensor, replace, replace_if_alike, rewrite_each
from torchkiln.graph.operators import becomes_loop

_aten = torch.ops.aten

_WITH_ADDEND = {_aten.mm.default: _aten.addmm.default, _aten.bmm.default: _aten.baddbmm.default}
_DTYPES = (torch.float32, torch.float64)
# Elements of a sum from which on the library's call costs no more than a matmul and a kernel.
_MANY = 2**18


def fuse_or_split_addmm(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    decomposed = rewrite_each(calls_of(graph, _aten.addmm.default), _decompose)
    sums = calls_of(graph, _aten.add.Tensor) if calls_of(graph, *_WITH_ADDEND) else ()
    return rewrite_each(sums, _fuse) or decomposed


def _decompose(node: torch.fx.Node) -> bool:
    value = fake_tensor(node)
    addend, *factors = node.args
    if node.kwargs or value is None or value.dtype not in _DTYPES or not has_one_dtype(node):
        return False
    if is_symbolic(value) and not _is_row(addend, value):
        return False
    if value.device.type != "cpu" or not (_is_small(value) or _is_read_by_loops(node)):
        return False
    matmul = insert_call(node, _aten.mm.default, *factors)
    return replace_if_alike(node, [matmul, insert_call(node, _aten.add.Tensor, matmul, addend)])


def _fuse(node: torch.fx.Node) -> bool:
    operands = _matmul_and_addend(node)
    if operands is None or _is_small(node.meta["val"]) or any(map(becomes_loop, _readers(node))):
        return False
    matmul, addend = operands
    replace(node, insert_known(node, node.meta["val"], _WITH_ADDEND[matmul.target], addend, *matmul.args))
    node.graph.erase_node(matmul)
    return True


def _is_small(total: torch.Tensor) -> bool:
    """Whether ``total`` is a matrix of so few elements that adding them costs less than the library's call for it.

    Symbolic sizes are taken for those of the example: either form is right at any size.
    """
    return total.dim() == 2 and size_hint(total.shape[0]) * size_hint(total.shape[1]) < _MANY


def _is_row(addend: Any, total: torch.Tensor) -> bool:
    """Whether ``addend`` is a vector as long as the rows of ``total`` for all symbolic sizes."""
    value = fake_tensor(addend)
    return value is not None and value.dim() == 1 and bool(expression(value.shape[0]) == expression(total.shape[1]))


def _matmul_and_addend(node: torch.fx.Node) -> tuple[Any, torch.fx.Node] | None:
    if node.kwargs or len(node.args) != 2:
        return None
    for matmul, addend in (node.args, node.args[::-1]):
        if not isinstance(matmul, torch.fx.Node) or not isinstance(addend, torch.fx.Node):
            return None
        if matmul.target in _WITH_ADDEND and len(matmul.users) == 1 and _may_be_added(matmul, addend, node):
            return matmul, addend
    return None


def _may_be_added(matmul: torch.fx.Node, addend: torch.fx.Node, total: torch.fx.Node) -> bool:
    """Whether the library adds what eager adds: floats of one dtype, the addend no larger than the matmul."""
    left, right = fake_tensor(matmul), fake_tensor(addend)
    if left is None or right is None or left.dtype not in _DTYPES or left.dtype != right.dtype:
        return False
    if not same_metadata(left, total.meta.get("val")) or not has_one_dtype(matmul):
        return False
    if right.dim() == 1:  # of the length of a row, or torch had not added it
        return not isinstance(right.shape[0], int) or right.shape[0] != 1
    if is_symbolic(right) or not 0 < right.dim() <= left.dim():
        return False
    sizes = zip(reversed(right.shape), reversed(left.shape), strict=False)
    return all(a == b for a, b in sizes if isinstance(b, int))


def _readers(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The readers of ``node`` and of views of it."""
    for user in node.users:
        yield from (user,) if view_source(user) is None else _readers(user)


def _is_read_by_loops(node: torch.fx.Node) -> bool:
    """Whether all readers are loops of ours, which do the addition on the way."""
    readers = list(_readers(node))
    return bool(readers) and all(map(becomes_loop, readers))
