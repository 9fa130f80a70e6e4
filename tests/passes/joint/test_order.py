"""The last pass of the stage puts nodes after what they read, and leaves an ordered graph as it is."""

from __future__ import annotations

import torch

from tests.passes.joint.graphs import check_same, text, trace
from torchkiln.graph.order import sort_nodes
from torchkiln.passes.joint import JOINT


def test_nodes_inserted_too_late_are_moved_up() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos() + x.exp()

    gm = trace(function, torch.ones(3))
    before = text(gm)
    assert not sort_nodes(gm)
    assert text(gm) == before
    sin, cos, _exp, add = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default) + [
        node for node in gm.graph.nodes if node.op == "call_function" and node.name != "sin"
    ]
    add.prepend(sin)
    assert sort_nodes(gm)
    assert text(gm) == [
        "exp = aten.exp.default(x_1)",
        "sin = aten.sin.default(x_1)",
        "cos = aten.cos.default(sin)",
        "add = aten.add.Tensor(cos, exp)",
    ]
    check_same(gm, function, torch.ones(3))
    assert cos.args[0] is sin


def test_it_runs_after_the_passes_of_users() -> None:
    assert JOINT.passes[-1].name == "order"
