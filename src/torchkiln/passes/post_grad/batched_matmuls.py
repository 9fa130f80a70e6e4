"""Products of the slices of two stacks of matrices, done as one product of the stacks.

``[x[e] @ w[e] for e in range(8)]``, as loops over experts or heads write it, is ``bmm(x, w)``. The stacks are there, so
nothing is copied. One thread, float32, microseconds:

| products | one by one | together |
|---|---|---|
| 32 of 4 x 32 x 32 | 54 | 9 |
| 8 of 16 x 64 x 64 | 21 | 9 |
| 8 of 64 x 64 x 64 | 41 | 28 |
| 4 of 1 x 256 x 256 | 33 | 38 |

Matrices that are not slices of one tensor would have to be stacked first, which costs what is gained: 85.8 one by one
against 85.6 for the third row, 160 against 209 for 16 of 8 x 128 x 128. They are left alone, as are larger ones.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.fake import has_one_dtype, update_fake_values

_aten = torch.ops.aten

_LEAST = 2
_MOST_WORK = 1 << 18  # of one product: rows times terms times columns


@dataclass(frozen=True)
class _Slice:
    """Matrix ``index`` of ``stack`` along ``dim``, ``turned`` or not."""

    stack: torch.fx.Node
    dim: int
    turned: bool
    index: int


def multiply_stacks(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    found = [
        node
        for target in (_aten.mm.default, _aten.addmm.default)
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    if len(found) < _LEAST:
        return False
    aliases = Aliases(graph)
    groups: dict[Any, dict[int, torch.fx.Node]] = defaultdict(dict)
    for node in found:
        slices = _slices(node)
        if slices is None or node in aliases.returned or aliases.any_written(node.all_input_nodes):
            continue  # what is returned is a tensor of its own
        group = groups[node.target, *((s.stack, s.dim, s.turned) for s in slices)]
        group.setdefault(slices[0].index, node)
    changed = False
    for group in groups.values():
        changed |= _multiply(graph, group)
    if changed:
        update_fake_values(graph_module)
    return changed


def _slices(node: torch.fx.Node) -> list[_Slice] | None:
    """The operands as slices at one index of three-dimensional stacks, an addend as one of a matrix of rows."""
    value = node.meta.get("val")
    if node.kwargs or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return None
    if not has_one_dtype(node):
        return None
    slices: list[_Slice] = []
    for position, operand in enumerate(node.args):
        found = _read(operand)
        addend = node.target is _aten.addmm.default and position == 0
        if found is None or found.stack.meta["val"].dim() != (2 if addend else 3) or (addend and found.turned):
            return None
        slices.append(found)
    if len({s.index for s in slices}) > 1 or len({_count(s) for s in slices}) > 1:
        return None
    rows, columns, terms = *value.shape, slices[-1].stack.meta["val"].numel()
    if not all(isinstance(size, int) for size in (rows, columns, terms)):
        return None
    return slices if rows > 1 and rows * terms // _count(slices[0]) <= _MOST_WORK else None


def _count(found: _Slice) -> int:
    count: int = found.stack.meta["val"].shape[found.dim]
    return count


def _read(operand: Any) -> _Slice | None:
    turned = False
    while isinstance(operand, torch.fx.Node) and operand.op == "call_function":
        if operand.target is _aten.t.default or (
            operand.target is _aten.permute.default and list(operand.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]
        ):
            turned = not turned
            operand = operand.args[0]
        elif operand.target is _aten.select.int and not operand.kwargs:
            stack, dim, index = operand.args
            return _slice_of(stack, dim, index, turned)
        elif operand.target is operator.getitem:
            whole, index = operand.args
            if not isinstance(whole, torch.fx.Node) or whole.target is not _aten.unbind.int or whole.kwargs:
                return None
            return _slice_of(whole.args[0], whole.args[1] if len(whole.args) > 1 else 0, index, turned)
        else:
            return None
    return None


def _slice_of(stack: Any, dim: Any, index: Any, turned: bool) -> _Slice | None:
    value = stack.meta.get("val") if isinstance(stack, torch.fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(dim, int) or not isinstance(index, int):
        return None
    dim %= value.dim()
    count = value.shape[dim]
    return _Slice(stack, dim, turned, index % count) if isinstance(count, int) and count else None


def _multiply(graph: torch.fx.Graph, group: dict[int, torch.fx.Node]) -> bool:
    nodes = sorted(group.values())
    slices = _slices(nodes[0])
    assert slices is not None
    if len(group) < _LEAST or sorted(group) != list(range(_count(slices[0]))):
        return False
    # Together at the first: the stacks must be there by then, and nothing else that a product reads is.
    first = nodes[0]
    with graph.inserting_before(first):
        operands = [_stack_first(graph, s) for s in slices]
        if first.target is _aten.addmm.default:
            operands[0] = graph.call_function(_aten.unsqueeze.default, (operands[0], 1))
            together = graph.call_function(_aten.baddbmm.default, tuple(operands))
        else:
            together = graph.call_function(_aten.bmm.default, tuple(operands))
        results = {k: graph.call_function(_aten.select.int, (together, 0, k)) for k in group}
    together.meta["stack_trace"] = first.meta.get("stack_trace")
    for index, node in group.items():
        results[index].meta["stack_trace"] = node.meta.get("stack_trace")
        node.replace_all_uses_with(results[index])
        graph.erase_node(node)
    return True


def _stack_first(graph: torch.fx.Graph, found: _Slice) -> torch.fx.Node:
    rank = found.stack.meta["val"].dim()
    rest = [axis for axis in range(rank) if axis != found.dim]
    order = [found.dim, *(reversed(rest) if found.turned else rest)]
    if order == list(range(rank)):
        return found.stack
    return graph.call_function(_aten.permute.default, (found.stack, order))
