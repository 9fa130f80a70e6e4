"""Matmuls of one input with several matrices, such as those for queries, keys and values, as one matmul.

The matrices have to lie side by side for that. Concatenating them at each call costs many times what is gained, so it
is done for constants only, while compiling; parameters are inputs of the graph and stay apart. One thread, float32,
three matrices, microseconds:

| rows of the input, size of the matrices | three matmuls | one | one, with the cat at the call |
|---|---|---|---|
| 1, 768 x 768 | 446 | 387 | 3711 |
| 1, 2048 x 2048 | 2635 | 2328 | 822522 |
| 16, 768 x 768 | 1093 | 1243 | 4611 |
| 1, 2048 x 2048, transposed | 2572 | 2704 | |

So: at most eight rows, and matrices whose rows are contiguous.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.fake import attribute_of, has_one_dtype, update_fake_values
from torchkiln.graph.insertion import insert_call
from torchkiln.graph.nodes import calls_of, fake_tensor, replace, unused_attribute

_aten = torch.ops.aten

_MOST_ROWS = 8


def merge_matmuls(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    found = calls_of(graph, _aten.mm.default)
    if len(found) < 2:
        return False
    aliases = Aliases(graph)
    groups: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    for node in found:
        left = node.args[0]
        if isinstance(left, torch.fx.Node) and node not in aliases.returned and _has_constant_matrix(node):
            groups[left].append(node)
    changed = False
    for left, nodes in groups.items():
        rows = left.meta["val"].shape[0]
        if len(nodes) > 1 and isinstance(rows, int) and rows <= _MOST_ROWS:
            _merge(graph_module, left, nodes)
            changed = True
    if changed:
        update_fake_values(graph_module)
    return changed


def _has_constant_matrix(node: torch.fx.Node) -> bool:
    right, owner = node.args[1], node.graph.owning_module
    if not isinstance(right, torch.fx.Node) or right.op != "get_attr" or owner is None:
        return False
    if fake_tensor(node) is None or not has_one_dtype(node):
        return False
    matrix = attribute_of(owner, str(right.target))
    return type(matrix) is torch.Tensor and matrix.is_contiguous()


def _merge(graph_module: torch.fx.GraphModule, left: torch.fx.Node, nodes: list[torch.fx.Node]) -> None:
    matrices = [attribute_of(graph_module, str(node.args[1].target)) for node in nodes]  # type: ignore[union-attr]
    name = unused_attribute(graph_module, "_side_by_side")
    graph_module.register_buffer(name, torch.cat(matrices, dim=1), persistent=False)
    first = min(nodes)
    with graph_module.graph.inserting_before(first):
        weights = graph_module.graph.get_attr(name)
    wide = insert_call(first, _aten.mm.default, left, weights)
    parts = insert_call(first, _aten.split_with_sizes.default, wide, [matrix.shape[1] for matrix in matrices], 1)
    for position, node in enumerate(nodes):
        replace(node, insert_call(node, operator.getitem, parts, position))
