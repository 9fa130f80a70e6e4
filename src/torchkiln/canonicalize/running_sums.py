"""Running sums of one number, such as positions counted by ``cumsum`` of ones: multiples of it, made from ``arange``.

torch's running sum is a call that walks a dimension in order. The multiples are computed where they are read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.graph.insertion import SizeArguments, insert_call
from torchkiln.graph.nodes import calls_of, replace_if_alike
from torchkiln.graph.operators import CONVERT
from torchkiln.graph.uniform import Number, converted, sums_exactly, uniform_values

_aten = torch.ops.aten


def replace_running_sums(graph_module: torch.fx.GraphModule) -> bool:
    """Every running sum of a uniform tensor whose steps are exact in the type it is taken in."""
    graph = graph_module.graph
    sums = calls_of(graph, _aten.cumsum.default)
    if not sums:
        return False
    known = uniform_values(graph_module)
    sizes = SizeArguments(graph)
    changed = False
    for node in sums:
        number = known.get(node.args[0])  # type: ignore[arg-type]
        if number is not None and node not in known:  # sums of zeros are known to be zeros
            changed |= replace_if_alike(node, _multiples(node, converted(number, node.meta["val"].dtype), sizes))
    return changed


def _multiples(node: torch.fx.Node, number: Number, sizes: SizeArguments) -> list[torch.fx.Node]:
    """Nodes of which the last has ``number``, twice ``number``, ... along the dimension; none where that is not it."""
    value = node.meta["val"]
    rank, dim = value.dim(), node.args[1]
    if rank == 0 or not isinstance(dim, int):
        return []
    dim %= rank
    length: Any = value.shape[dim]
    floating = value.dtype.is_floating_point
    if floating and (not isinstance(length, int) or not sums_exactly(number, length, value.dtype)):
        return []
    shape = sizes.arguments(value.shape, node)
    if shape is None:
        return []
    made: list[torch.fx.Node] = []

    def add(target: Any, *args: Any, **kwargs: Any) -> None:
        made.append(insert_call(node, target, *args, **kwargs))

    add(_aten.arange.start_step, 0, shape[dim], 1, dtype=torch.int64, device=value.device, pin_memory=False)
    add(_aten.add.Tensor, made[-1], 1)
    if floating:
        # Half types are summed in float32, and rounded when they are stored.
        add(CONVERT, made[-1], torch.float64 if value.dtype == torch.float64 else torch.float32)
    if number != 1:
        add(_aten.mul.Tensor, made[-1], number)
    if made[-1].meta["val"].dtype != value.dtype:
        add(CONVERT, made[-1], value.dtype)
    if rank > 1:
        if dim < rank - 1:
            add(_aten.view.default, made[-1], [shape[dim], *[1] * (rank - 1 - dim)])
        add(_aten.expand.default, made[-1], shape)
        add(_aten.clone.default, made[-1], memory_format=torch.contiguous_format)
    return made
