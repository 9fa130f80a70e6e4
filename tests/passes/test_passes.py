"""Each pass: what it changes, what it must leave alone, and the same values as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.interpreted import targets
from torchkiln.canonicalize.identities import remove_identities
from torchkiln.canonicalize.no_ops import remove_no_ops
from torchkiln.passes.post_grad import remove_dead_code
from torchkiln.passes.post_grad.common_subexpressions import merge_common_subexpressions
from torchkiln.passes.pre_grad import remove_dead_code as remove_captured_dead_code

aten = torch.ops.aten


def _trace(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(value) for value in inputs))


def _same_result(gm: torch.fx.GraphModule, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    gm.graph.lint()
    gm.recompile()
    expected = function(*(value.clone() for value in inputs))
    torch.testing.assert_close(gm(*(value.clone() for value in inputs)), expected, rtol=0, atol=0, equal_nan=True)


X = torch.tensor([[1.0, -0.0, float("nan")], [float("inf"), -2.5, 0.0]])
SQUARE = torch.arange(9.0).reshape(3, 3)
INTEGERS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: aten.view.default(x, [2, 3]).sin(), X),
        (lambda x: aten.expand.default(x, [2, 3]).sin(), X),
        (lambda x: aten.permute.default(x, [0, -1]).sin(), X),
        (lambda x: aten.transpose.int(x, 1, -1).sin(), X),
        (lambda x: aten.slice.Tensor(x, 0, 0, 9).sin(), X),
        (lambda x: aten._to_copy.default(x, dtype=torch.float32).sin(), X),
        (lambda x: aten.clone.default(x).sin(), X),
        (lambda x: aten.mul.Tensor(x, 1).sin(), X),
        (lambda x: aten.div.Tensor(x, 1.0).sin(), X),
        (lambda x: aten.add.Tensor(x, 0).bitwise_not(), INTEGERS),
        (lambda x: aten.constant_pad_nd.default(x, [0, 0], 5.0).sin(), X),
    ],
)
def test_no_ops_go(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    gm = _trace(function, inputs)
    assert remove_no_ops(gm, saves_for_backward=False)
    assert len(targets(gm)) == 1
    _same_result(gm, function, inputs)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: aten.add.Tensor(x, 0).sin(), X),  # turns -0.0 into 0.0
        (lambda x: aten.mul.Tensor(x, 1.0).sin(), INTEGERS),  # makes a float of an integer
        (lambda x: aten.div.Tensor(x, 1).sin(), INTEGERS),
        (lambda x: aten.permute.default(x, [1, 0]).sin(), SQUARE),
        (lambda x: aten.t.default(x).sin(), SQUARE),
        (lambda x: aten.permute.default(x, [1, 0]).sin(), torch.ones(1, 1)),  # kept: it costs nothing
        (lambda x: aten.slice.Tensor(x, 0, 1).sin(), X),
        (lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format).sin(), X),
        (lambda x: aten._to_copy.default(x, dtype=torch.float64).sin(), X),
        (lambda x: aten.expand.default(x, [2, 2, 3]).sin(), X),
        (lambda x: aten.constant_pad_nd.default(x, [1, -1], 5.0).sin(), X),
    ],
)
def test_what_changes_values_or_layout_stays(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    gm = _trace(function, inputs)
    before = targets(gm)
    assert not remove_no_ops(gm, saves_for_backward=False)
    assert targets(gm) == before


def test_a_copy_that_leaves_the_graph_stays_a_copy() -> None:
    for function in (lambda x: aten.clone.default(x), lambda x: aten.clone.default(x).view(3, 2)):
        gm = _trace(function, X)
        assert not remove_no_ops(gm, saves_for_backward=False)
        assert aten.clone.default in targets(gm)


def test_a_copy_taken_before_a_write_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = aten.clone.default(x)
        aten.copy_.default(x, before.cos())
        return before.sin()

    gm = _trace(function, X)
    assert not remove_no_ops(gm, saves_for_backward=False)
    _same_result(gm, function, X)


def test_a_copy_that_is_written_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        scratch = aten.clone.default(x)
        aten.add_.Tensor(scratch, 1)
        return scratch.sin() + x

    gm = _trace(function, X)
    assert not remove_no_ops(gm, saves_for_backward=False)
    _same_result(gm, function, X)


def test_the_joint_graph_keeps_copies_of_what_the_user_can_write() -> None:
    def of_input(x: torch.Tensor) -> torch.Tensor:
        return aten.clone.default(x).sin()

    def of_output(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, aten.clone.default(y).sin()

    def of_neither(x: torch.Tensor) -> torch.Tensor:
        return aten.clone.default(x.exp()).sin()

    assert not remove_no_ops(_trace(of_input, X), saves_for_backward=True)
    assert not remove_no_ops(_trace(of_output, X), saves_for_backward=True)
    gm = _trace(of_neither, X)
    assert remove_no_ops(gm, saves_for_backward=True)
    _same_result(gm, of_neither, X)


def test_equal_computations_become_one() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1) * (x.sin() + 1) + x.amax(1, True) * x.amax(1, True)

    gm = _trace(function, X)
    assert merge_common_subexpressions(gm)
    assert targets(gm).count(aten.sin.default) == 1
    assert targets(gm).count(aten.amax.default) == 1
    assert targets(gm).count(aten.add.Tensor) == 2
    _same_result(gm, function, X)


def test_several_results_of_one_operator_are_merged_with_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x, 2)[0] + torch.topk(x, 2)[0] * torch.topk(x, 2)[1]

    gm = _trace(function, SQUARE)
    assert merge_common_subexpressions(gm)
    assert targets(gm).count(aten.topk.default) == 1
    _same_result(gm, function, SQUARE)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin() + x.cos(),
        lambda x: aten.full.default([2, 3], 1) + aten.full.default([2, 3], 1.0) * aten.full.default([2, 3], True),
        lambda x: aten.mul.Tensor(x, 0.0) + aten.mul.Tensor(x, -0.0),
        lambda x: aten.bernoulli.p(x, 0.5) + aten.bernoulli.p(x, 0.5),
    ],
    ids=["other operator", "type of a constant", "sign of zero", "random"],
)
def test_computations_that_differ_stay_apart(function: Callable[..., Any]) -> None:
    gm = _trace(function, X)
    before = targets(gm)
    assert not merge_common_subexpressions(gm)
    assert targets(gm) == before


def test_two_outputs_stay_two_tensors() -> None:
    gm = _trace(lambda x: (x.sin(), x.sin(), x.sin().view(-1)), X)
    merge_common_subexpressions(gm)
    gm.recompile()
    first, second, third = gm(X)
    first.zero_()
    torch.testing.assert_close(second, X.sin(), equal_nan=True)
    torch.testing.assert_close(third, X.sin().view(-1), equal_nan=True)


def test_reads_before_and_after_a_write_are_not_merged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x.sin()
        aten.copy_.default(x, before + 1)
        return before * x.sin()

    gm = _trace(function, X)
    merge_common_subexpressions(gm)
    _same_result(gm, function, X)


def test_dead_code_goes_and_random_draws_stay() -> None:
    gm = _trace(lambda x: (x.cos().exp(), aten.bernoulli.p(x, 0.5), x.sin())[2], X)
    assert remove_dead_code(gm)
    assert targets(gm) == [aten.bernoulli.p, aten.sin.default]


def test_dropout_that_is_off_hands_back_its_argument() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, 0.5, False) + F.dropout(x, p=0.0, training=True)
        return y + F.dropout2d(x, 0.3, training=False) + F.alpha_dropout(x, 0.3)

    gm = torch.fx.symbolic_trace(function)
    assert remove_identities(gm)
    assert not any("dropout" in getattr(target, "__name__", "") for target in targets(gm))
    x = torch.randn(2, 3, 4)
    gm.recompile()
    torch.testing.assert_close(gm(x), function(x), rtol=0, atol=0)


def test_dropout_that_is_on_or_wrong_stays() -> None:
    for function in (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5, True), lambda x: F.dropout2d(x, 0.2)):
        assert not remove_identities(torch.fx.symbolic_trace(function))
    graph = torch.fx.Graph()
    graph.output((graph.call_function(F.dropout, (graph.placeholder("x"), 1.5, False)),))
    assert not remove_identities(torch.fx.GraphModule({}, graph))


def test_identity_modules_go() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Identity())
    gm = torch.fx.symbolic_trace(model)
    assert remove_identities(gm)
    gm.recompile()
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "call_module", "output"]
    torch.testing.assert_close(gm(X), X.relu(), equal_nan=True)


def test_dead_captured_calls_go_only_when_known_to_be_pure() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.size(0)
        x + 1
        x.add_(1)
        F.dropout(x)
        return x * 2

    gm = torch.fx.symbolic_trace(function)
    assert remove_captured_dead_code(gm)
    assert [node.name for node in gm.graph.nodes] == ["x", "add_", "dropout", "mul", "output"]
