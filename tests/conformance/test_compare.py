"""The judge of the conformance suite: it sees every kind of difference, and excuses only rounding."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.compare import as_near_as_eager, copy_arguments, difference

X = torch.arange(6.0).view(2, 3)

DIFFERENT = {
    "dtype": (X, X.double()),
    "sizes": (X, X.view(3, 2)),
    "strides": (X.t().contiguous().t(), X),
    "values": (X, X + torch.tensor([0.0, 0.0, 1e-3])),
    "NaN": (X, torch.where(X == 2, math.nan, X)),
    "structure": ([X, X], [X]),
    "kind": (X, 3),
    "number": (3, 4),
    "gradient flag": (X.clone().requires_grad_(True), X),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_kind_of_difference_is_seen(name: str) -> None:
    ours, eager = DIFFERENT[name]
    assert difference(ours, eager) is not None
    assert difference(eager, eager) is None


def test_strides_of_dimensions_that_are_not_stepped_along_do_not_count() -> None:
    assert difference(torch.empty_strided((1, 3), (7, 1)).zero_(), torch.zeros(1, 3)) is None


def test_values_can_be_left_out_of_the_comparison() -> None:
    assert difference(X, X + 1, values=False) is None
    assert difference(X, (X + 1).double(), values=False) is not None


def test_an_error_like_eagers_is_excused_and_a_larger_one_is_not() -> None:
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    eager = torch.tensor([1.0, 1.0, 1.0, 1.001])
    assert as_near_as_eager(torch.tensor([1.001, 1.0, 1.0, 1.0]), eager, exact) is None
    assert as_near_as_eager(torch.tensor([1.004, 1.0, 1.0, 1.0]), eager, exact) is not None


def test_an_infinite_error_of_eager_excuses_nothing() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager = torch.tensor([math.inf, 2.0])
    assert as_near_as_eager(torch.tensor([1.0, 2.0]), eager, exact) is None
    assert as_near_as_eager(torch.tensor([1.5, 2.0]), eager, exact) is not None
    assert as_near_as_eager(torch.tensor([math.nan, 2.0]), eager, exact) is not None


def test_what_rounds_to_infinity_may_be_infinite() -> None:
    exact = torch.tensor([1e6], dtype=torch.float64)
    assert as_near_as_eager(torch.tensor([math.inf]).half(), torch.tensor([65504.0]).half(), exact) is None


def test_copies_of_arguments_keep_strides_overlaps_and_flags() -> None:
    base = torch.arange(10.0)
    left, right = base[1:5], base[3:9:2]
    again = torch.ones(2, requires_grad=True)
    copies = copy_arguments([left, right, left.expand(3, 4), again, again])
    assert [c.stride() for c in copies] == [(1,), (2,), (0, 1), (1,), (1,)]
    copies[0][2] = 100.0
    assert copies[1][0] == 100.0
    assert base[3] == 3.0
    assert copies[3] is copies[4]
    assert copies[3].requires_grad
