"""Matrices that are turned, and copies that only lay them out anew."""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.graph.captured_calls import is_call, operand, tensor_of


def is_turned(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether ``node`` is its operand with the last two dimensions in each other's place, the others as they were."""
    value = tensor_of(graph_module, operand(node))
    if value is None or value.dim() < 2:
        return False
    rank = value.dim()
    if node.target is torch.transpose:
        return {node.kwargs.get("dim0"), node.kwargs.get("dim1")} == {rank - 2, rank - 1}
    return is_call(node, torch.permute) and node.kwargs.get("dims") == (*range(rank - 2), rank - 1, rank - 2)


def is_contiguous_copy(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether ``node`` is ``x.contiguous()`` of something that is not."""
    if node.op != "call_method" or node.target != "contiguous" or len(node.args) != 1 or node.kwargs:
        return False
    copy, original = tensor_of(graph_module, node), tensor_of(graph_module, operand(node))
    # Dynamo ran the call: what is contiguous came out as it went in.
    return copy is not None and original is not None and copy is not original
