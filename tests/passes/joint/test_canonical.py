"""One canonical form for what can be written in several ways, equal to the bit; near misses stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.canonicalize.aten_calls import canonicalize
from torchkiln.passes.post_grad.common_subexpressions import merge_common_subexpressions

aten = torch.ops.aten
X = torch.tensor([[1.0, -0.0, math.nan, 1e-45], [math.inf, -2.5, 0.0, 3e38]])
N = torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x: aten.t(x), X, "t = aten.permute.default(x_1, [1, 0])"),
        (lambda x: aten.transpose(x, 0, -1), X, "transpose = aten.permute.default(x_1, [1, 0])"),
        (lambda x: aten._unsafe_view(x, [-1]), X, "_unsafe_view = aten.view.default(x_1, [8])"),
        (lambda x: aten.view(x, [4, -1]), X, "view = aten.view.default(x_1, [4, 2])"),
        (lambda x: aten.expand(x, [3, -1, 4]), X, "expand = aten.expand.default(x_1, [3, 2, 4])"),
        (lambda x: aten.mul.Scalar(x, 3), X, "mul = aten.mul.Tensor(x_1, 3)"),
        (lambda x: aten.add.Scalar(x, 2.5), N, "add = aten.add.Tensor(x_1, 2.5)"),
        (lambda x: aten.div.Tensor(x, 8), X, "div = aten.mul.Tensor(x_1, 0.125)"),
        (lambda x: aten.div.Tensor(x, -0.25), X.bfloat16(), "div = aten.mul.Tensor(x_1, -4.0)"),
        (lambda x: aten.div.Scalar(x, 2.0**126), X, f"div = aten.mul.Tensor(x_1, {2.0**-126})"),
        (lambda x: aten.sub.Tensor(x, 0.1), X, "sub = aten.add.Tensor(x_1, -0.1)"),
        (lambda x: aten.sub.Tensor(x, 3), N, "sub = aten.add.Tensor(x_1, -3)"),
        (lambda x: aten.sum.dim_IntList(x, [-1], True), X, "sum_1 = aten.sum.dim_IntList(x_1, [1], True)"),
        (lambda x: aten._softmax(x, -1, False), X, "_softmax = aten._softmax.default(x_1, 1, False)"),
        (lambda x: aten.unsqueeze(x, -1), X, "unsqueeze = aten.unsqueeze.default(x_1, 2)"),
        (lambda x: aten.cat([x, x], -1), X, "cat = aten.cat.default([x_1, x_1], 1)"),
        (
            lambda x: aten._to_copy(x, dtype=torch.float64),
            X,
            "_to_copy = prims.convert_element_type.default(x_1, torch.float64)",
        ),
    ],
)
def test_the_canonical_form(function: Callable[..., Any], inputs: torch.Tensor, expected: str) -> None:
    gm = trace(function, inputs)
    assert canonicalize(gm)
    assert text(gm) == [expected]
    check_same(gm, function, inputs)
    assert not canonicalize(gm)  # nothing is spelled back and forth


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: aten.div.Tensor(x, 3.0), X),
        (lambda x: aten.div.Tensor(x, 2.0**127), X),  # its inverse is no normal number
        (lambda x: aten.div.Tensor(x, 2.0**20), X.half()),
        (lambda x: aten.div.Tensor(x, 0.0), X),
        (lambda x: aten.div.Tensor(x, math.inf), X),
        (lambda x: aten.div.Tensor(x, 4), N),
        (lambda x: aten.div.Tensor_mode(x, 4, rounding_mode="floor"), X),
        (lambda x: aten.sub.Tensor(x, 0), X),
        (lambda x: aten.sub.Tensor(x, 3), N.to(torch.uint8)),
        (lambda x: aten.sub.Tensor(x, -(2**63)), N),
        (lambda x: aten.sub.Tensor(x, 3, alpha=2), X),
        (lambda x: aten.sub.Tensor(x, x), X),
        (lambda x: aten._to_copy(x, dtype=torch.float64, memory_format=torch.contiguous_format), X),
        (lambda x: aten.sum.dim_IntList(x, [1]), X),
    ],
)
def test_what_is_not_the_same_stays(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    gm = trace(function, inputs)
    before = text(gm)
    assert not canonicalize(gm)
    assert text(gm) == before


def test_a_factor_of_one_is_not_written() -> None:
    gm = trace(lambda x: x - x, X)
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
    node.kwargs = {"alpha": 1}
    assert canonicalize(gm)
    assert text(gm) == ["sub = aten.sub.Tensor(x_1, x_1)"]
    node.kwargs = {"alpha": 2}
    assert not canonicalize(gm)


def test_equal_sums_become_one() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * (y + x) / 2 + (y + x) * 0.5

    gm = trace(function, X, X.flip(0))
    assert canonicalize(gm)
    merge_common_subexpressions(gm)
    assert sum("aten.add.Tensor(x_1, y_1)" in line for line in text(gm)) == 1
    assert not any("aten.add.Tensor(y_1, x_1)" in line for line in text(gm))
    check_same(gm, function, X, X.flip(0))


def test_constants_go_last() -> None:
    gm = trace(lambda x: torch.arange(4.0) * x, X)
    assert canonicalize(gm)
    assert text(gm)[-1] == "mul = aten.mul.Tensor(x_1, arange)"


def test_operands_that_decide_the_strides_stay() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).view(-1) + (y + x).t().reshape(-1)

    x, y = torch.randn(3, 3), torch.randn(3, 3).t()
    gm = trace(function, x, y)
    canonicalize(gm)
    check_same(gm, function, x, y)
    assert any("aten.add.Tensor(y_1, x_1)" in line for line in text(gm))


def test_symbolic_sizes_add_no_guard() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.t() / 4).sum(-1) + aten.mul.Scalar(x, 2).view(-1)[0]

    gm = trace_symbolic(function, X)
    guards = len(gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env.guards)
    assert canonicalize(gm)
    check_same(gm, function, X)
    assert len(gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env.guards) == guards


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = (x @ w.transpose(-1, -2)) / 8.0 - 0.5
        return scores.softmax(-1).to(torch.float64).sum(-1, keepdim=True) + (x.sum() + w.sum()) - (w.sum() + x.sum())

    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    compile_and_compare(function, x, w, expects="canonical", rtol=1e-4)
    compile_and_compare(function, x, w, expects="canonical", dynamic=True, rtol=1e-4)
