"""How nodes run, as the partition sees it: in kernels, or as calls that read memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx

from torchkiln.partition import kinds
from torchkiln.partition.cost import floating_point_operations
from torchkiln.partition.nbytes import Bytes

aten = torch.ops.aten


def _node(target: Any, *arguments: Any) -> torch.fx.Node:
    graph = torch.fx.Graph()
    given = []
    for value in arguments:
        given.append(graph.placeholder(f"x{len(given)}") if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor):
            given[-1].meta["val"] = value
    node = graph.call_function(target, tuple(given))
    node.meta["val"] = target(*arguments)
    return node


X = torch.randn(6, 6)


@pytest.mark.parametrize(
    ("node", "fusible", "outside"),
    [
        (_node(aten.sin.default, X), True, False),
        (_node(aten.floor_divide.default, X, X), True, False),
        (_node(aten.flip.default, X, [0]), True, False),
        (_node(aten.sum.dim_IntList, X, [0]), False, False),
        (_node(aten.cumsum.default, X, 0), False, True),
        (_node(aten.sort.default, X), False, True),
        (_node(aten.mm.default, X, X), False, True),
        (_node(aten.permute.default, X, [1, 0]), False, False),
    ],
    ids=lambda value: str(value.target) if isinstance(value, torch.fx.Node) else "",
)
def test_what_reads_memory_runs_outside_of_kernels(node: torch.fx.Node, fusible: bool, outside: bool) -> None:
    assert kinds.is_fusible(node) == fusible
    assert kinds.runs_outside_kernels(node) == outside


def test_a_sort_is_no_reduction_that_a_kernel_takes_in() -> None:
    assert kinds.is_reduction(_node(aten.amax.default, X))
    assert not kinds.is_reduction(_node(aten.sort.default, X))
    assert not kinds.is_listed(_node(aten.sort.default, X))


def test_flops_of_a_node_follow_its_arguments() -> None:
    bias, left, right = torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)
    assert floating_point_operations(_node(aten.addmm.default, bias, left, right), Bytes()) == 2 * 3 * 4 * 5
    form = ([1, 1], [0, 0], [1, 1], False, [0, 0], 2)
    convolution = _node(aten.convolution.default, torch.randn(1, 4, 5, 5), torch.randn(6, 2, 3, 3), None, *form)
    assert floating_point_operations(convolution, Bytes()) == 2 * (6 * 3 * 3) * (2 * 3 * 3)
    assert floating_point_operations(_node(aten.sin.default, X), Bytes()) == 0
