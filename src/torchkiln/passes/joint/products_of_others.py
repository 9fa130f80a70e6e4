"""Products of all other elements along a dimension, as in the gradient of a product: from one product of them all.

torch multiplies running products from both ends, of copies that begin with 1. Here the product of all elements that are
not zero, in float64, is divided by each. Where there is one zero, it is the only element whose others have another
product than zero; among more, none has. A zero times an infinity or NaN is NaN, as in eager.

Gradient of a product of 768 x 1024 float32 numbers along rows, one thread of a Zen 5, in microseconds: running products
914, this 111, eager 605.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.dtypes import FLOATS, HALF
from torchkiln.graph.fake import same_metadata
from torchkiln.graph.flips import is_flip
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import argument, calls_of, fake_tensor, replace_if_alike
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.uniform import uniform_values

_aten = torch.ops.aten


def divide_products(graph_module: torch.fx.GraphModule) -> bool:
    """Every product of running products from both ends that leave out the element between them."""
    graph = graph_module.graph
    if len(calls_of(graph, _aten.cumprod.default)) < 2:
        return False
    known = uniform_values(graph_module)
    ones = {node for node, number in known.items() if number == 1}
    changed = False
    for node in calls_of(graph, _aten.mul.Tensor):
        for before, after in (node.args[:2], node.args[1::-1]):
            found = _elements(before, after, ones)
            if found is not None:
                changed |= replace_if_alike(node, _products(node, *found))
                break
    return changed


def _elements(before: Any, after: Any, ones: set[torch.fx.Node]) -> tuple[torch.fx.Node, int] | None:
    """Of which elements, along which dimension, these are the products of those before and after each."""
    dim = _dim(before, _aten.cumprod.default)
    value = fake_tensor(before)
    if dim is None or value is None or value.dtype not in FLOATS:
        return None
    first = _after_a_one(before.args[0], dim, ones)
    if first is None or not is_flip(after, dim) or _dim(after.args[0], _aten.cumprod.default) != dim:
        return None
    last = _after_a_one(after.args[0].args[0], dim, ones)
    if last is None or not is_flip(last, dim):
        return None
    left, right = _part(first, dim, 0), _part(last.args[0], dim, 1)
    if left is None or left is not right or not same_metadata(left.meta["val"].shape, value.shape):
        return None
    return (left, dim) if left.meta["val"].dtype == value.dtype else None


def _dim(node: Any, target: Any) -> int | None:
    """The dimension that a call of ``target`` is along, without another dtype; None for anything else."""
    if not isinstance(node, torch.fx.Node) or node.target is not target or node.kwargs:
        return None
    dim = argument(node, "dim")
    return dim % node.meta["val"].dim() if isinstance(dim, int) and node.meta["val"].dim() else None


def _after_a_one(node: Any, dim: int, ones: set[torch.fx.Node]) -> torch.fx.Node | None:
    """What is concatenated to a single one."""
    if _dim(node, _aten.cat.default) != dim or len(node.args[0]) != 2:
        return None
    one, rest = node.args[0]
    return rest if one in ones and one.meta["val"].shape[dim] == 1 else None


def _part(node: Any, dim: int, start: int) -> torch.fx.Node | None:
    """What a slice without its last element, or from ``start`` 1 on, is of."""
    if _dim(node, _aten.slice.Tensor) != dim or argument(node, "start") != start or argument(node, "step") != 1:
        return None
    source: torch.fx.Node = node.args[0]
    length: Any = source.meta["val"].shape[dim]
    return source if same_metadata(node.meta["val"].shape[dim], length - 1) else None


def _products(node: torch.fx.Node, x: torch.fx.Node, dim: int) -> list[torch.fx.Node]:
    dtype = x.meta["val"].dtype
    made: list[torch.fx.Node] = []

    def add(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made.append(insert_call(node, target, *args, **kwargs))
        return made[-1]

    def converted(value: torch.fx.Node, wanted: torch.dtype) -> torch.fx.Node:
        return value if value.meta["val"].dtype == wanted else add(CONVERT, value, wanted)

    computed = torch.float32 if dtype in HALF else dtype
    x = converted(x, computed)
    is_zero = add(_aten.eq.Scalar, x, 0)
    is_wild = add(_aten.ne.Scalar, add(_aten.mul.Tensor, x, 0.0), 0)  # infinite or NaN
    zeros = add(_aten.sum.dim_IntList, is_zero, [dim], True)
    wild = add(_aten.sum.dim_IntList, is_wild, [dim], True)
    one = add(_aten.scalar_tensor.default, 1.0, dtype=torch.float64, device=x.meta["val"].device)
    terms = add(_aten.where.self, is_zero, one, converted(x, torch.float64))
    product = converted(add(_aten.prod.dim_int, terms, dim, True), computed)
    others_wild = add(_aten.gt.Scalar, add(_aten.sub.Tensor, wild, converted(is_wild, torch.int64)), 0)
    nothing = add(_aten.where.ScalarSelf, others_wild, float("nan"), add(_aten.zeros_like.default, x))
    alone = add(_aten.logical_and.default, is_zero, add(_aten.eq.Scalar, zeros, 1))
    without = add(_aten.where.self, alone, product, nothing)
    divided = add(_aten.div.Tensor, product, x)
    converted(add(_aten.where.self, add(_aten.eq.Scalar, zeros, 0), divided, without), dtype)
    return made
