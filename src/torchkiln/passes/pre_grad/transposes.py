"""Transposed matrices, and copies that only change their layout."""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.graph.captured_calls import is_call, operand
from torchkiln.passes.pre_grad.rewriting import CapturedGraph


def copied_transpose(graph: CapturedGraph, copy: torch.fx.Node | None) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """The transpose that ``copy`` makes contiguous, and what is transposed: the last two dimensions are swapped."""
    transpose = None if copy is None or not _is_contiguous_copy(graph, copy) else operand(copy)
    source = None if transpose is None else operand(transpose)
    value = graph.tensor(source)
    if transpose is None or source is None or value is None or value.dim() < 2:
        return None
    rank = value.dim()
    if transpose.target is torch.transpose:
        swapped = {transpose.kwargs.get("dim0"), transpose.kwargs.get("dim1")} == {rank - 2, rank - 1}
    else:
        dims = (*range(rank - 2), rank - 1, rank - 2)
        swapped = is_call(transpose, torch.permute) and transpose.kwargs.get("dims") == dims
    return (transpose, source) if swapped else None


def _is_contiguous_copy(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    if node.op != "call_method" or node.target != "contiguous" or len(node.args) != 1 or node.kwargs:
        return False
    copy, original = graph.tensor(node), graph.tensor(operand(node))
    # Dynamo ran the call: what is contiguous came out as it went in.
    return copy is not None and original is not None and copy is not original
