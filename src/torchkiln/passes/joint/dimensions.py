"""One spelling for dimensions: counted from the front, a swap in ascending order, and a swap never a permutation.

``x.transpose(-1, -2)``, ``x.transpose(2, 3)``, ``x.mT`` and ``x.permute(0, 1, 3, 2)`` are one node then, and so are
``softmax(x, -1)`` and ``softmax(x, 3)``; rewrites should not have to know.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

_aten = torch.ops.aten

# Operators with a dimension of their first argument in second place. (For unsqueeze and stack it is one of the result.)
_ONE = frozenset(
    {
        _aten._log_softmax.default,
        _aten._softmax.default,
        _aten.cat.default,
        _aten.cumsum.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
    }
)
_SECOND_AFTER = frozenset({_aten.split.Tensor, _aten.split_with_sizes.default})
_BACKWARD = frozenset({_aten._log_softmax_backward_data.default, _aten._softmax_backward_data.default})
_SEVERAL = frozenset(
    {
        _aten.all.dim,
        _aten.amax.default,
        _aten.amin.default,
        _aten.any.dim,
        _aten.mean.dim,
        _aten.sum.dim_IntList,
    }
)


def count_dimensions_from_the_front(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or len(node.args) < 2:
            continue
        rank = _rank(node.args[0])
        if rank:
            changed |= _rewrite(node, rank)
    return changed


def _rank(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return max(map(_rank, value), default=0)
    tensor = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return tensor.dim() if isinstance(tensor, torch.Tensor) else 0


def _rewrite(node: torch.fx.Node, rank: int) -> bool:
    args = list(node.args)
    target = node.target
    if target is _aten.transpose.int:
        args[1:3] = sorted(int(dim) % rank for dim in args[1:3])  # type: ignore[call-overload]
    elif target is _aten.permute.default:
        order = [int(dim) % rank for dim in args[1]]  # type: ignore[union-attr, arg-type]
        moved = [dim for dim in range(rank) if order[dim] != dim]
        if len(moved) == 2:
            node.target, args = _aten.transpose.int, [args[0], *moved]
        else:
            args[1] = order
    elif target in _ONE or target in _BACKWARD or target in _SEVERAL:
        place = 2 if target in _SECOND_AFTER or target in _BACKWARD else 1
        if len(args) > place:
            args[place] = _counted(args[place], rank)
    if target is node.target and args == list(node.args):
        return False
    node.args = tuple(args)
    return True


def _counted(dims: Any, rank: int) -> Any:
    if isinstance(dims, (list, tuple)):
        return [_counted(dim, rank) for dim in dims]
    return dims % rank if isinstance(dims, int) and dims < 0 else dims
