"""Tensors of one number fold to the bit; products with zero, signs of zero, types and strides stay what they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.canonicalize.uniform_values import fold_uniform_values
from torchkiln.graph.uniform import sums_exactly, uniform_values

aten = torch.ops.aten
X = torch.tensor([[1.0, -0.0, math.nan], [math.inf, -2.5, 0.0]])
N = torch.arange(6).reshape(2, 3)
TRUTHS = torch.tensor([[True, False, True], [False, False, True]])


def _folded(function: Callable[..., Any], *inputs: torch.Tensor) -> list[str]:
    gm = trace(function, *inputs)
    assert fold_uniform_values(gm, saves_for_backward=False)
    lines = text(gm)
    check_same(gm, function, *inputs)
    return lines


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: (torch.ones(2, 3) * 3 - 1).exp(), math.exp(2)),
        (lambda x: torch.zeros_like(x) + 2.5, 2.5),
        (lambda x: torch.full_like(x, 2.0).pow(3).view(6), 8.0),
        (lambda x: x.new_full((4,), 3.0).expand(2, 4).clone(), 3.0),
        (lambda x: torch.full((2, 1), 2.0).expand(2, 5) + torch.ones(5), 3.0),
        (lambda x: torch.ones(4, 3, dtype=torch.int64).to(torch.bfloat16), 1.0),
        (lambda x: torch.cat([torch.ones(2), torch.ones(3)]), 1.0),
        (lambda x: torch.ones(4, 6).t().sum(1), 4.0),
        (lambda x: torch.full((3, 5), 0.1, dtype=torch.float64).mean(), None),
        (lambda x: torch.full((3, 5), 0.125).mean(1), 0.125),
        (lambda x: torch.full((3, 5), -7.25).amax(1), -7.25),
        (lambda x: torch.ones(3, 5, dtype=torch.bool).sum(), 15),
        (lambda x: torch.ones(3, 5).prod(1), 1.0),
        (lambda x: torch.zeros(3, 5).any(), False),
        (lambda x: torch.ones(3, 5).bool().all(0), True),
        (lambda x: torch.where(x > 0, torch.ones(2, 3), torch.ones(2, 3)), 1.0),
        (lambda x: torch.where(torch.ones(2, 3) > 0, torch.full((2, 3), 4.0), x), 4.0),
        (lambda x: x.masked_fill(torch.ones(2, 3, dtype=torch.bool), -math.inf), -math.inf),
        (lambda x: (x > 0) & torch.zeros(2, 3, dtype=torch.bool), False),
        (lambda x: torch.logical_or(x, torch.ones(2, 3)), True),
        (lambda x: x.to(torch.int32) * torch.zeros(2, 3, dtype=torch.int32), 0),
        (lambda x: torch.nn.functional.pad(torch.zeros(2, 3), (1, 1)), 0.0),
        (lambda x: torch.tensor(2.0) * 3, 6.0),
    ],
)
def test_a_uniform_result_is_filled(function: Callable[..., Any], number: float | None) -> None:
    if number is None:  # the sum of a tenth depends on its order
        assert not fold_uniform_values(gm := trace(function, X), saves_for_backward=False), text(gm)
        return
    lines = _folded(function, X)
    assert len(lines) == 1
    assert ".full.default(" in lines[0]
    written = function(X).flatten()[0].item()
    assert written == pytest.approx(number, rel=1e-6)
    assert f", {written}, " in lines[0]


def test_the_graph_reads_as_expected() -> None:
    assert _folded(lambda x: x * (torch.ones(2, 3) + 1) + torch.full((), 0.5), X) == [
        "mul_tensor = aten.mul.Tensor(x_1, 2.0)",
        "add_tensor = aten.add.Tensor(mul_tensor, 0.5)",
    ]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: (x * torch.ones(2, 3)).sin(), X),
        (lambda x: (torch.ones(3) * x).sin(), X),
        (lambda x: (x / torch.ones(())).sin(), X),
        (lambda x: (x - torch.zeros(2, 1)).sin(), X),
        (lambda x: (x + torch.zeros(2, 3, dtype=torch.int64)).bitwise_not(), N),
        (lambda x: (torch.full((3,), -0.0) + x).sin(), X),
        (lambda x: torch.where(torch.zeros(2, 3) > 0, torch.ones(()), x).sin(), X),
        (lambda x: x.masked_fill(torch.zeros(3, dtype=torch.bool), 4.0).sin(), X),
        (lambda x: torch.logical_and(x, torch.ones(2, 3)).bitwise_not(), TRUTHS),
        (lambda x: (x | torch.zeros(2, 3, dtype=torch.bool)).bitwise_not(), TRUTHS),
    ],
)
def test_a_neutral_operand_goes(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    assert len(_folded(function, inputs)) == 1


def test_a_neutral_operand_of_a_wider_type_leaves_the_cast() -> None:
    assert [line.split(" = ")[1] for line in _folded(lambda x: (x * torch.ones(2, 3)).sin(), X.bfloat16())][:1] == [
        "prims.convert_element_type.default(x_1, torch.float32)"
    ]
    assert "convert_element_type" in _folded(lambda x: (x / torch.ones(2, 3)).sin(), N)[0]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: x * torch.zeros(2, 3), X),  # NaN and infinities stay NaN
        (lambda x: x + torch.zeros(2, 3), X),  # -0.0 becomes 0.0
        (lambda x: x - torch.full((2, 3), -0.0), X),
        (lambda x: x * torch.ones(4, 2, 3), X),  # broadcast: the copies are to be made
        (lambda x: torch.where(x > 0, torch.zeros(2, 3), torch.full((2, 3), -0.0)), X),
        (lambda x: x[0] + torch.ones(2, 3)[0].sin() * x[1], X),
        (lambda x: torch.full((70000,), 65504.0, dtype=torch.float64).float().sum() + x, X),
        (lambda x: torch.maximum(x, torch.ones(2, 3) * 2), X),
        (lambda x: x * torch.full((), 0.1), X.bfloat16()),  # a tenth is another number in bfloat16
        (lambda x: x + torch.ones(2, 3, dtype=torch.float64), X),
    ],
)
def test_values_types_and_shapes_stay(function: Callable[..., Any], inputs: torch.Tensor) -> None:
    gm = trace(function, inputs)
    fold_uniform_values(gm, saves_for_backward=False)
    check_same(gm, function, inputs)


def test_a_float_times_zero_is_computed() -> None:
    gm = trace(lambda x: x * torch.zeros(2, 3), X)
    fold_uniform_values(gm, saves_for_backward=False)
    assert any("aten.mul.Tensor(x_1, 0.0)" in line for line in text(gm))


def test_written_memory_is_not_uniform() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(2, 3)
        aten.copy_.default(y, x)
        return y + 1

    gm = trace(function, X)
    assert not uniform_values(gm)
    assert not fold_uniform_values(gm, saves_for_backward=False)


def test_a_view_that_leaves_the_graph_stays_one() -> None:
    gm = trace(lambda x: ((y := torch.zeros(2, 3) + 1), y.view(6)), X)
    fold_uniform_values(gm, saves_for_backward=False)
    gm.recompile()
    whole, flat = gm(X)
    whole.add_(1)
    assert flat.tolist() == [2.0] * 6


def test_random_numbers_are_still_drawn() -> None:
    gm = trace(lambda x: torch.bernoulli(torch.ones(2, 3)) * 0 + x, X)
    fold_uniform_values(gm, saves_for_backward=False)
    assert any("bernoulli" in line for line in text(gm))


def test_layouts_other_than_row_major_are_kept() -> None:
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    lines = _folded(lambda x: torch.zeros_like(x) * 2 + 1, x)
    assert [line.split(" = ")[1].split("(")[0] for line in lines] == ["aten.full.default", "aten.permute.default"]


def test_symbolic_sizes_are_written_with_the_sizes_of_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(x.shape[0], 1) + (torch.zeros_like(x) + 3).sum(1, keepdim=True) * torch.zeros(()).cos()

    def made(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) + 3

    gm = trace_symbolic(function, X)
    guards = len(_shape_env(gm).guards)
    assert fold_uniform_values(gm, saves_for_backward=True)
    check_same(gm, function, X)
    assert len(_shape_env(gm).guards) == guards

    gm = trace_symbolic(made, X)
    assert fold_uniform_values(gm, saves_for_backward=True)
    assert [line.split(" = ")[1].split("(")[0] for line in text(gm)] == [
        "aten.sym_size.int",
        "aten.sym_size.int",
        "aten.full.default",
    ]
    gm.recompile()
    torch.testing.assert_close(gm(torch.ones(5, 7)), torch.full((5, 7), 3.0))


def _shape_env(gm: torch.fx.GraphModule) -> Any:
    return gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env


@given(
    number=st.floats(width=32, allow_nan=False, allow_infinity=False),
    count=st.integers(1, 4000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_exact_sums_are_the_same_in_any_order(number: float, count: int, dtype: torch.dtype) -> None:
    if not sums_exactly(number, count, dtype):
        return
    values = torch.full((count,), number, dtype=dtype)
    one_by_one = values.cumsum(0)
    expected = [number * k for k in range(1, count + 1)]  # in double: the condition is that float32 has them too
    assert one_by_one.tolist() == expected
    assert values.sum().item() == expected[-1]


def test_inexact_sums_are_told() -> None:
    assert sums_exactly(1.0, 1 << 24, torch.float32)
    assert not sums_exactly(1.0, (1 << 24) + 1, torch.float32)
    assert not sums_exactly(0.1, 3, torch.float32)
    assert not sums_exactly(-0.0, 3, torch.float32)
    assert not sums_exactly(math.inf, 3, torch.float32)
    assert sums_exactly(7, 1 << 62, torch.int64)


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w) * torch.ones(3) + torch.zeros_like(x[:, :3])
        return y.mean(0) * torch.full((3,), 2.0).sqrt() + torch.ones(4, 3).sum(0)

    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    compile_and_compare(function, x, w, expects="uniform_values", rtol=1e-5)
    compile_and_compare(function, x, w, expects="uniform_values", dynamic=True, rtol=1e-5)
