"""Collectives stay as they are and in order, whatever passes do around them."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives
import torch.fx
from torch import Tensor

from tests.passes.post_grad.functional_graphs import traced
from torchkiln import config
from torchkiln.graph.manager import PassManager
from torchkiln.passes.post_grad import POST_GRAD

collectives = torch.ops._c10d_functional


def test_collectives_keep_their_number_and_order() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        early = x.sin()
        first = collectives.all_reduce.default(x, "sum", "0")
        again = collectives.all_reduce.default(x, "sum", "0")  # equal to the one before: both are to be made
        unused = collectives.all_gather_into_tensor.default(y, 2, "0")
        collectives.wait_tensor.default(unused)
        second = collectives.wait_tensor.default(again)
        third = collectives.wait_tensor.default(first)
        late = collectives.reduce_scatter_tensor.default(y * 2, "sum", 2, "0")
        return second + third + early, collectives.wait_tensor.default(late)

    gm = traced(function, torch.randn(4, 4), torch.randn(4, 4))

    def made() -> list[str]:
        return [
            f"{node.name} {node.target}"
            for node in gm.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"
        ]

    before = made()
    assert len(before) == 8
    PassManager(config.resolve({"checks": True})).run(POST_GRAD, gm, kind="inference")
    assert made() == before
    # What nobody needs before them was moved after them.
    names = [node.name for node in gm.graph.nodes]
    assert names.index("sin") > names.index("wait_tensor_2")
