"""Linear layers of one input, such as those for queries, keys and values, as one matmul whose parts are views.

The weights lie side by side from their preparation on, so only the matmuls count. One thread of an AMD Zen 4, three
layers of n x n with bias, time of one matmul to that of three, best of 12 to 150 interleaved runs. As operators of
torch, in brackets with the parts copied, as readers do that need contiguous memory:

| rows | float32, n = 256 | 1024 | 3072 | bfloat16, n = 256 | 1024 | 3072 |
|---|---|---|---|---|---|---|
| 1 | 0.76 | 0.93 | 0.87 | 0.44 | 0.91 | 0.99 |
| 8 | 0.86 (1.07) | 1.14 | 1.36 | 0.49 (0.67) | 0.91 (0.86) | 0.96 (0.79) |
| 32 | 0.94 (1.04) | 1.11 | 1.15 | 0.64 (0.81) | 0.90 (0.99) | 0.84 (0.98) |
| 128 | 1.01 | 1.14 | 1.13 | 0.83 (0.94) | 1.26 | 1.25 |
| 512 | 0.91 (1.04) | 1.01 | 1.00 | 0.98 | 0.98 | |

Compiled, a call costs less than an operator's: one row of float32 takes 1.01 of the time of three for n = 256, 0.93 for
768, 1.05 for 1024, 0.97 for 2048. Small matmuls of bfloat16 are calls of BLAS (:mod:`torchkiln.lowering.matmul`), and
one is 1.02 to 1.07 of three; a matmul that is too large for that takes 0.53 to 0.63 (16 to 32 rows, n = 768 and 1024)
and 0.88 to 0.97 (n = 2048).

So: bfloat16, up to 32 rows, where the one matmul is an operator's.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import replace
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values
from torchkiln.graph.weights import is_weight, weight_values
from torchkiln.passes.freezing.linears import Linear, linears

_aten = torch.ops.aten

_MOST_ROWS: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 32})
# Multiplications above which a matmul of bfloat16 is an operator's.
_LEAST_WORK = 2**25


def merge_linears(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    constant = weight_values(graph)
    groups = [group for group in _groups(linears(graph, constant), Aliases(graph)) if len(group) > 1 and _pays(group)]
    promised = returned_values(graph)
    replaced: dict[torch.fx.Node, Any] = {}
    for group in groups:
        replaced.update(_merge(group, constant))
    if replaced:
        propagate_strides(graph, replaced)
        keep_output_strides(graph, promised)
    return bool(replaced)


def _groups(found: Iterable[Linear], aliases: Aliases) -> list[list[Linear]]:
    groups: dict[Hashable, list[Linear]] = defaultdict(list)
    for linear in found:
        value = linear.node.meta["val"]
        rows = value.shape[0]
        # Two results that leave the graph stay two tensors.
        if isinstance(rows, int) and rows <= _MOST_ROWS.get(value.dtype, 0) and linear.node not in aliases.returned:
            groups[_same_input(linear), value.dtype].append(linear)
    return list(groups.values())


def _pays(group: Sequence[Linear]) -> bool:
    rows = int(group[0].node.meta["val"].shape[0])
    return rows * sum(math.prod(linear.features) for linear in group) > _LEAST_WORK


def _same_input(linear: Linear) -> Hashable:
    """Equal for layers of one input: each may have its own view of it."""
    given = linear.input
    if given.target is _aten.view.default:
        return given.args[0], *given.meta["val"].shape
    return given


def _merge(group: Sequence[Linear], constant: frozenset[torch.fx.Node]) -> dict[torch.fx.Node, Any]:
    """Let readers read parts of one matmul; the parts, with the values that readers knew."""
    first = group[0].node  # they are in graph order
    _move_before(first, [node for linear in group for node in (linear.matrix, linear.bias) if node], constant)
    sizes = [linear.features[1] for linear in group]
    matrix = _side_by_side(first, group)
    if any(linear.bias is not None for linear in group):
        biases = [linear.bias or _zeros(first, linear) for linear in group]
        wide = insert_call(first, _aten.addmm.default, _cat(first, biases, 0), group[0].input, matrix)
    else:
        wide = insert_call(first, _aten.mm.default, group[0].input, matrix)
    rows = first.meta["val"].shape[0]
    if rows == 1:  # parts of one row are contiguous, and are to look so
        wide = insert_call(first, _aten.view.default, wide, [sum(sizes)])
    parts = insert_call(first, _aten.split_with_sizes.default, wide, sizes, 0 if rows == 1 else 1)
    replaced: dict[torch.fx.Node, Any] = {}
    for position, linear in enumerate(group):
        part = insert_call(linear.node, operator.getitem, parts, position)
        if rows == 1:
            part = insert_call(linear.node, _aten.view.default, part, [1, sizes[position]])
        replaced[part] = linear.node.meta["val"]
        replace(linear.node, part)
    return replaced


def _side_by_side(before: torch.fx.Node, group: Sequence[Linear]) -> torch.fx.Node:
    weights = [linear.weight for linear in group if linear.weight is not None]
    if len(weights) == len(group):  # kept out by in, as the library's packed forms want it
        return insert_call(before, _aten.permute.default, _cat(before, weights, 0), [1, 0])
    return _cat(before, [linear.matrix for linear in group], 1)


def _cat(before: torch.fx.Node, nodes: Sequence[torch.fx.Node], dim: int) -> torch.fx.Node:
    return insert_call(before, _aten.cat.default, list(nodes), dim)


def _zeros(before: torch.fx.Node, linear: Linear) -> torch.fx.Node:
    options: dict[str, Any] = {"dtype": linear.node.meta["val"].dtype, "device": torch.device("cpu")}
    return insert_call(before, _aten.full.default, [linear.features[1]], 0, **options)


def _move_before(place: torch.fx.Node, nodes: Iterable[torch.fx.Node], constant: frozenset[torch.fx.Node]) -> None:
    """Compute values that depend on weights alone before ``place``."""
    needed, waiting = set[torch.fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node > place and node not in needed and not is_weight(node):
            assert node in constant
            needed.add(node)
            waiting += node.all_input_nodes
    for node in sorted(needed):
        place.prepend(node)
