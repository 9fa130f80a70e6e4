"""Products of one input with several matrices, such as those for queries, keys and values, done as one.

The matrices have to lie side by side for that. Doing so at each call costs many times what is gained, so only constants
are joined, while compiling; parameters are inputs of the graph and stay apart. One thread, float32, three
matrices, microseconds:

| rows of the input, size of the matrices | three products | one | one, joined at the call |
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

_aten = torch.ops.aten

_MOST_ROWS = 8


def widen_products(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    found = graph.find_nodes(op="call_function", target=_aten.mm.default)
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
            _widen(graph_module, left, nodes)
            changed = True
    if changed:
        update_fake_values(graph_module)
    return changed


def _has_constant_matrix(node: torch.fx.Node) -> bool:
    right, value = node.args[1], node.meta.get("val")
    if not isinstance(right, torch.fx.Node) or right.op != "get_attr" or not isinstance(value, torch.Tensor):
        return False
    if not has_one_dtype(node):
        return False
    owner = node.graph.owning_module
    matrix = attribute_of(owner, str(right.target)) if owner is not None else None
    return type(matrix) is torch.Tensor and matrix.is_contiguous()


def _widen(graph_module: torch.fx.GraphModule, left: torch.fx.Node, nodes: list[torch.fx.Node]) -> None:
    graph = graph_module.graph
    matrices = [attribute_of(graph_module, str(node.args[1].target)) for node in nodes]  # type: ignore[union-attr]
    number = 0
    while hasattr(graph_module, f"_side_by_side{number}"):
        number += 1
    name = f"_side_by_side{number}"
    graph_module.register_buffer(name, torch.cat(matrices, dim=1), persistent=False)
    first = min(nodes)
    with graph.inserting_before(first):
        wide = graph.call_function(_aten.mm.default, (left, graph.get_attr(name)))
        parts = graph.call_function(_aten.split_with_sizes.default, (wide, [matrix.shape[1] for matrix in matrices], 1))
        for position, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (parts, position))
            part.meta["stack_trace"] = node.meta.get("stack_trace")
            node.replace_all_uses_with(part)
    wide.meta["stack_trace"] = parts.meta["stack_trace"] = first.meta.get("stack_trace")
    for node in nodes:
        graph.erase_node(node)
