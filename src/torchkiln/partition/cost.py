"""How long a node takes to run: from its arithmetic and its bytes with rates measured here, or by running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from torchkiln.graph.operators import becomes_loop, flops
from torchkiln.partition import kinds
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.nbytes import Bytes
from torchkiln.partition.projections import computing_node
from torchkiln.partition.rates import bandwidth, best_seconds, flops_per_second

# Beside its arithmetic and bytes, a call of a library or a kernel of its own.
_CALL_SECONDS = 2e-6


def estimated_seconds(info: NodeInfo) -> Mapping[torch.fx.Node, float]:
    """A run time for every node outside of backward, from arithmetic and bytes."""
    return {node: _estimate(node, info.sizes) for node in info.nbytes}


def _estimate(node: torch.fx.Node, sizes: Bytes) -> float:
    if node.op != "call_function" or kinds.is_free(node):
        return 0.0
    value = node.meta.get("val")
    written = sizes.of(value)
    if kinds.is_fusible(node):
        return written / bandwidth()  # what it reads, the kernel it becomes part of reads anyway
    # A loop that reduces what a kernel computes is part of that kernel, and reads nothing more.
    fused = kinds.is_reduction(node) and becomes_loop(node)
    own_reads = [s for s in node.all_input_nodes if not (fused and kinds.is_fusible(s))]
    moved = written + sum(sizes.of(source.meta.get("val")) for source in own_reads)
    seconds = _CALL_SECONDS + moved / bandwidth()
    operations = floating_point_operations(node, sizes)
    first = _first(value)
    if operations and isinstance(first, torch.Tensor):
        seconds = max(seconds, operations / flops_per_second(_measurable(first.dtype)))
    return seconds


def _measurable(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else torch.float32


def floating_point_operations(node: torch.fx.Node, sizes: Bytes) -> int:
    """Multiplications and additions of a matmul, a convolution or attention; 0 for anything else."""
    result = _first(node.meta.get("val"))
    if not kinds.is_product(node) or not isinstance(result, torch.Tensor):
        return 0

    def in_numbers(source: torch.fx.Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            return tuple(map(sizes.number, value.shape))
        return sizes.number(value) if isinstance(value, torch.SymInt) else value

    shape = tuple(map(sizes.number, result.shape))
    return flops(node.target, torch.fx.map_arg(node.args, in_numbers), shape)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (tuple, list)) and value else value


def profiled_seconds(info: NodeInfo) -> Mapping[torch.fx.Node, float]:
    """A run time for every node outside of backward, by running each distinct one on made-up tensors.

    What cannot be run so, for its symbolic sizes or arguments that are no tensors, is estimated.
    """
    known: dict[object, float] = {}
    found: dict[torch.fx.Node, float] = {}
    for node in info.nbytes:
        if node.op != "call_function" or kinds.is_free(node) or not isinstance(node.target, torch._ops.OpOverload):
            found[node] = 0.0
            continue
        if node not in info.repeatable:
            found[node] = _estimate(node, info.sizes)
            continue
        key = _signature(node)
        if key not in known:
            known[key] = _profile(node, info.sizes)
        found[node] = known[key]
    return found


def _signature(node: torch.fx.Node) -> object:
    def describe(source: torch.fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return str(value)
        return str((value.dtype, value.shape, value.stride() if value.layout is torch.strided else value.layout))

    return node.target, str(torch.fx.map_arg((node.args, node.kwargs), describe))


def _profile(node: torch.fx.Node, sizes: Bytes) -> float:
    def make(source: torch.fx.Node) -> Any:
        value = source.meta.get("val")
        if isinstance(value, torch.SymInt):
            return sizes.number(value)
        assert isinstance(value, torch.Tensor)
        shape, stride = ([sizes.number(n) for n in part] for part in (value.shape, value.stride()))
        # Zeros are in the range of everything that takes positions.
        return torch.zeros(sizes.of(value) // value.itemsize, dtype=value.dtype).as_strided(shape, stride)

    target = computing_node(node).target
    assert callable(target)
    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), make)
        return best_seconds(lambda: target(*args, **kwargs), 3)
    except Exception:
        return _estimate(node, sizes)


COSTS: Mapping[str, Callable[[NodeInfo], Mapping[torch.fx.Node, float]]] = {
    "estimated": estimated_seconds,
    "profiled": profiled_seconds,
}
"""By the setting ``recomputation_costs``."""
