"""No-ops go to the bit, with symbolic sizes too; what only looks like one stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.canonicalize.no_ops import remove_no_ops
from torchkiln.graph.tangents import mark_tangent

aten = torch.ops.aten
X = torch.tensor([[1.0, -0.0, float("nan")], [float("inf"), -2.5, 0.0]])
N = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: aten.sub.Tensor(x, 0).sin(), X),  # -0.0 - 0 is -0.0
        (lambda x: aten.add.Tensor(x, -0.0).sin(), X),
        (lambda x: aten.sub.Scalar(x, 0).sin(), X),
        (lambda x: aten.mul.Scalar(x, 1.0).sin(), X),
        (lambda x: aten.pow.Tensor_Scalar(x, 1).sin(), X),
        (lambda x: aten.cat.default([x]).sin(), X),
        (lambda x: aten.repeat.default(x, [1, 1]).sin(), X),
        (lambda x: aten.where.self(x > 0, x, x).sin(), X),
        (lambda x: aten.slice_scatter.default(aten.ones_like.default(x), x, 1, 0, 9).sin(), X),
        (lambda x: aten.copy.default(aten.zeros_like.default(x), x).sin(), X),
        (lambda x: torch.ops.prims.convert_element_type(x, torch.float32).sin(), X),
        (lambda x: aten.neg.default(aten.neg.default(x)).sin(), X),
        (lambda x: aten.bitwise_not.default(aten.bitwise_not.default(x)).sin(), N),
        (lambda x: aten.sub.Tensor(x, 0).bitwise_not(), N),
    ],
)
def test_the_argument_is_read_instead(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    gm = trace(function, inputs)
    assert remove_no_ops(gm, saves_for_backward=False)
    assert len(text(gm)) == 1
    check_same(gm, function, inputs)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: aten.add.Tensor(aten.exp.default(x), 0) * 2, 2),  # an exponential is never -0.0
        (lambda x: aten.add.Tensor(aten.add.Tensor(x, 1.5), 0.0) * 2, 2),
        (lambda x: aten.relu.default(aten.relu.default(x)) * 2, 2),
        (lambda x: aten.abs.default(aten.abs.default(x)) * 2, 2),
    ],
)
def test_what_the_argument_is_made_by_decides(function: Callable[..., Any], left: int) -> None:
    gm = trace(function, X)
    assert remove_no_ops(gm, saves_for_backward=True)
    assert len(text(gm)) == left
    check_same(gm, function, X)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: aten.add.Tensor(x, 0.0).sin(), X),
        (lambda x: aten.sub.Tensor(x, -0.0).sin(), X),
        (lambda x: aten.add.Tensor(x.exp(), 0.0, alpha=float("inf")).sin(), X),
        (lambda x: aten.add.Tensor(aten.add.Tensor(x, -1e-45), 0.0).sin(), X.bfloat16()),
        (lambda x: aten.add.Tensor(aten.add.Tensor(x, -1e-60), 0.0).sin(), X),
        (lambda x: aten.sub.Tensor(x, 0.0).sin(), N),
        (lambda x: aten.mul.Tensor(x, 1).sin(), N.bool()),
        (lambda x: aten.div.Tensor_mode(x, 1, rounding_mode="floor").sin(), X),
        (lambda x: aten.pow.Scalar(1, x).sin(), X),
        (lambda x: aten.cat.default([x, x]).sin(), X),
        (lambda x: aten.where.self(x > 0, x, -x).sin(), X),
        (lambda x: aten.where.self((x > 0).unsqueeze(0), x, x).sin(), X),
        (lambda x: aten.slice_scatter.default(x, x[:, :2], 1, 0, 2).sin(), X),
        (lambda x: aten.copy.default(aten.zeros.default([2, 3]), x[0]).sin(), X),
        (lambda x: aten.neg.default(aten.abs.default(x)).sin(), X),
    ],
)
def test_what_changes_a_bit_stays(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    gm = trace(function, inputs)
    before = text(gm)
    assert not remove_no_ops(gm, saves_for_backward=False)
    assert text(gm) == before


def test_symbolic_sizes_are_compared_as_expressions() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = aten.slice.Tensor(aten.view.default(x.exp(), [x.shape[0], x.shape[1]]), 0, 0, x.shape[0])
        return aten.expand.default(y, [x.shape[0], x.shape[1]]) * 2

    gm = trace_symbolic(function, X)
    assert remove_no_ops(gm, saves_for_backward=True)
    assert [line.split(" = ")[1].split("(")[0] for line in text(gm)] == ["aten.exp.default", "aten.mul.Tensor"]
    check_same(gm, function, X)

    half = trace_symbolic(lambda x: aten.slice.Tensor(x.exp(), 0, 0, x.shape[0] // 2) * 2, X)
    assert not remove_no_ops(half, saves_for_backward=True)


def test_incoming_gradients_are_read_without_a_copy() -> None:
    graph = trace(lambda gradient: aten.mul.Tensor(gradient, 1).sin(), X)
    mark_tangent(graph.graph.find_nodes(op="placeholder")[0], 0)
    assert remove_no_ops(graph, saves_for_backward=True)
    assert not remove_no_ops(trace(lambda x: aten.mul.Tensor(x, 1).sin(), X), saves_for_backward=True)


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).exp()
        y = torch.cat([y - 0, y]) * 1
        return torch.where(y > 2, y, y).to(torch.float32)[:] + 0

    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    compile_and_compare(function, x, w, expects="no_ops", rtol=1e-5)
    compile_and_compare(function, x, w, expects="no_ops", dynamic=True, rtol=1e-5)
