"""How long a node takes to run: from its arithmetic and its bytes at the rates of the target, or by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from torchkiln.graph.dtypes import FLOATS
from torchkiln.graph.operators import becomes_loop, flops
from torchkiln.partition import kinds
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.nbytes import Bytes
from torchkiln.partition.rates import bandwidth, best_seconds, flops_per_second
from torchkiln.target import Target

# Beside its arithmetic and bytes, a call of a library or a kernel of its own.
_CALL_SECONDS = 2e-6


def estimated_seconds(info: NodeInfo, target: Target) -> Mapping[Node, float]:
    """A run time for every node outside of backward, from arithmetic and bytes."""
    return {node: _estimate(node, info.sizes, target) for node in info.outside_backward}


def _estimate(node: Node, sizes: Bytes, target: Target) -> float:
    if node.op != "call_function" or kinds.is_free(node):
        return 0.0
    value = node.meta.get("val")
    written = sizes.of(value)
    if kinds.is_fusible(node):
        return written / bandwidth(target)  # what it reads, the kernel it becomes part of reads anyway
    # A loop that reduces what a kernel computes is part of that kernel, and reads nothing more.
    fused = kinds.is_reduction(node) and becomes_loop(node)
    own_reads = [s for s in node.all_input_nodes if not (fused and kinds.is_fusible(s))]
    moved = written + sum(sizes.of(source.meta.get("val")) for source in own_reads)
    seconds = _CALL_SECONDS + moved / bandwidth(target)
    operations = floating_point_operations(node, sizes)
    if operations:
        dtype = _first(value).dtype
        seconds = max(seconds, operations / flops_per_second(target, dtype if dtype in FLOATS else torch.float32))
    return seconds


def floating_point_operations(node: Node, sizes: Bytes) -> int:
    """Multiplications and additions of a matmul, a convolution or attention; 0 for anything else."""
    result = _first(node.meta.get("val"))
    if not kinds.is_matmul(node) or not isinstance(result, torch.Tensor):
        return 0

    def in_numbers(source: Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            return sizes.shape(value)
        return sizes.number(value) if isinstance(value, torch.SymInt) else value

    return flops(node.target, map_arg(node.args, in_numbers), sizes.shape(result))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) and value else value


def profiled_seconds(info: NodeInfo, target: Target) -> Mapping[Node, float]:
    """A run time for every node outside of backward, by running each distinct one on made-up tensors.

    What cannot be run so, for its symbolic sizes or arguments that are no tensors, is estimated.
    """
    known: dict[object, float] = {}
    found: dict[Node, float] = {}
    for node in info.outside_backward:
        if node.op != "call_function" or kinds.is_free(node) or not isinstance(node.target, torch._ops.OpOverload):
            found[node] = 0.0
            continue
        if node not in info.recomputable:
            found[node] = _estimate(node, info.sizes, target)
            continue
        key = _signature(node)
        if key not in known:
            known[key] = _profile(node, info.sizes, target)
        found[node] = known[key]
    return found


def _signature(node: Node) -> object:
    def describe(source: Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return str(value)
        return str((value.dtype, value.shape, value.stride() if value.layout is torch.strided else value.layout))

    return node.target, str(map_arg((node.args, node.kwargs), describe))


def _profile(node: Node, sizes: Bytes, target: Target) -> float:
    def make(source: Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, torch.SymInt):
            return sizes.number(value)
        assert isinstance(value, torch.Tensor)
        stride = tuple(map(sizes.number, value.stride()))
        # Zeros are in the range of everything that takes indices.
        return torch.zeros(sizes.of(value) // value.itemsize, dtype=value.dtype).as_strided(sizes.shape(value), stride)

    operator: Any = node.target
    try:
        args, kwargs = map_arg((node.args, node.kwargs), make)
        return best_seconds(lambda: operator(*args, **kwargs), 3)
    except Exception:
        return _estimate(node, sizes, target)


COSTS: Mapping[str, Callable[[NodeInfo, Target], Mapping[Node, float]]] = {
    "estimated": estimated_seconds,
    "profiled": profiled_seconds,
}
"""By the setting ``recomputation_costs``."""
