"""Running sums of one number become multiples of it, where every step is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.joint.graphs import check_same, compile_and_compare, text, trace, trace_symbolic
from torchkiln.canonicalize.running_sums import replace_running_sums
from torchkiln.canonicalize.uniform_values import fold_uniform_values

X = torch.randn(3, 5)


def test_positions_are_counted_by_arange() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(5, dtype=torch.int64).cumsum(0) * x

    gm = trace(function, X)
    assert replace_running_sums(gm)
    assert text(gm) == [
        "arange_start_step = aten.arange.start_step(0, 5, 1, dtype=torch.int64, device=cpu, pin_memory=False)",
        "add_tensor = aten.add.Tensor(arange_start_step, 1)",
        "mul = aten.mul.Tensor(add_tensor, x_1)",
    ]
    check_same(gm, function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.ones(3, 5).cumsum(0),
        lambda x: torch.ones(3, 5).cumsum(-1),
        lambda x: torch.ones(2, 3, 4, dtype=torch.bool).cumsum(1),
        lambda x: torch.full((4, 300), 3, dtype=torch.int8).cumsum(1, dtype=torch.int8),  # wraps
        lambda x: torch.full((4, 7), -2.5, dtype=torch.float64).cumsum(0),
        lambda x: torch.ones(1000, dtype=torch.bfloat16).cumsum(0),  # rounds when stored only
        lambda x: torch.full((600,), 0.25, dtype=torch.float16).cumsum(0),
        lambda x: torch.ones(4, 3, dtype=torch.int32).t().cumsum(0),
        lambda x: torch.ones(1, 1).cumsum(0),
    ],
)
def test_any_dimension_type_and_number(function: Callable[..., Any]) -> None:
    gm = trace(function, X)
    assert replace_running_sums(gm)
    assert not any("cumsum" in line for line in text(gm))
    check_same(gm, function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.cumsum(0),
        lambda x: torch.full((3, 5), 0.1).cumsum(1),  # depends on the order of rounding
        lambda x: torch.ones(()).cumsum(0),
        lambda x: torch.full((3,), float("inf")).cumsum(0),
        lambda x: torch.full((3,), -0.0).cumsum(0),
    ],
)
def test_others_are_summed(function: Callable[..., Any]) -> None:
    gm = trace(function, X)
    before = text(gm)
    assert not replace_running_sums(gm)
    assert text(gm) == before


def test_zeros_stay_zeros() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3, 5).cumsum(0)

    gm = trace(function, X)
    assert not replace_running_sums(gm)
    assert fold_uniform_values(gm, saves_for_backward=False)
    assert len(text(gm)) == 1
    check_same(gm, function, X)


def test_the_length_may_be_symbolic_for_integers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(x, dtype=torch.int64).cumsum(1) - 1

    gm = trace_symbolic(function, X)
    assert replace_running_sums(gm)
    assert not any("cumsum" in line for line in text(gm))
    check_same(gm, function, X)
    torch.testing.assert_close(gm(torch.ones(2, 9)), function(torch.ones(2, 9)))
    assert not replace_running_sums(trace_symbolic(lambda x: torch.ones_like(x).cumsum(1), X))


def test_compiled_training_gives_the_gradients_of_eager() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        positions = torch.ones(x.shape, dtype=torch.int64).cumsum(1) - 1
        return torch.nn.functional.embedding(positions, table).sum(-1) * x

    x, table = torch.randn(3, 5, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    compile_and_compare(function, x, table, expects="running_sums", rtol=1e-5)
    compile_and_compare(function, x, table, expects="running_sums", dynamic=True, rtol=1e-5)
