"""``cat`` and slices that undo each other, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.higher_order.against_eager import check
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.passes.post_grad.slices_of_cat import simplify_slices_of_cat

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)
Y = -X


def _slice(x: Tensor, *bounds: int) -> Tensor:
    return aten.slice.Tensor(x, *bounds)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            lambda x, y: aten.sin.default(aten.cat.default([_slice(x, 1, 0, 2), _slice(x, 1, 2, 6)], 1)),
            ["clone_default = clone.default(x_1, torch.contiguous_format)", "sin = sin.default(clone_default)"],
        ),
        (
            lambda x, y: aten.cat.default([_slice(x, 0, 1, 2), _slice(x, 0, 2, 3), _slice(x, 0, 3, 9)]),
            [
                "slice_tensor = slice.Tensor(x_1, 0, 1, 4)",
                "clone_default = clone.default(slice_tensor, torch.contiguous_format)",
            ],
        ),
        (
            lambda x, y: aten.cat.default([y, *aten.split.Tensor(x, 2, 1)[:2]], 1),
            ["slice_tensor = slice.Tensor(x_1, 1, 0, 4)", "cat = cat.default([y_1, slice_tensor], 1)"],
        ),
        (
            lambda x, y: aten.cat.default([aten.cat.default([x, y], 1), x], -1),
            ["cat_1 = cat.default([x_1, y_1, x_1], 1)"],
        ),
        (
            lambda x, y: aten.sin.default(_slice(aten.cat.default([x, y]), 0, 4, 8)),
            ["sin = sin.default(y_1)"],
        ),
        (
            lambda x, y: aten.sin.default(_slice(aten.cat.default([x, y], 1), 1, 7, 9)),
            ["slice_tensor = slice.Tensor(y_1, 1, 1, 3)", "sin = sin.default(slice_tensor)"],
        ),
    ],
)
def test_simplified(function: Callable[..., Any], expected: list[str]) -> None:
    gm = traced(function, X, Y)
    assert apply(simplify_slices_of_cat, gm)
    assert calls(gm) == expected
    same_numbers(gm, function, X, Y)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: aten.cat.default([_slice(x, 1, 2, 6), _slice(x, 1, 0, 2)], 1),  # the other way round
        lambda x, y: aten.cat.default([_slice(x, 1, 0, 2), _slice(x, 1, 3, 6)], 1),  # something between
        lambda x, y: aten.cat.default([_slice(x, 1, 0, 2), _slice(x, 1, 2, 4)], 0),  # along another dimension
        lambda x, y: aten.cat.default([_slice(x, 1, 0, 2), _slice(y, 1, 2, 6)], 1),  # of two tensors
        lambda x, y: aten.cat.default([_slice(x, 1, 0, 4, 2), _slice(x, 1, 4, 6)], 1),  # with a step
        lambda x, y: aten.cat.default([x, aten._to_copy.default(_slice(x, 1, 0, 2), dtype=torch.float64)], 1),
        lambda x, y: _slice(aten.cat.default([x, y]), 0, 4, 8),  # returned: a copy, not the input
        lambda x, y: aten.sin.default(_slice(aten.cat.default([x, y]), 0, 3, 5)),  # across two pieces
        lambda x, y: aten.view.default(_slice(aten.cat.default([x.t(), y.t()]), 0, 6, 12), [-1]).sin(),
    ],
)
def test_left_as_it_is(function: Callable[..., Any]) -> None:
    gm = traced(function, X, Y)
    before = calls(gm)
    assert not apply(simplify_slices_of_cat, gm)
    assert calls(gm) == before
    same_numbers(gm, function, X, Y)


def test_sizes_known_only_at_run_time() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return aten.cat.default([aten.cat.default([x, y], 1), x], 1)

    gm = traced(function, X, Y, symbolic=True)
    assert apply(simplify_slices_of_cat, gm)
    same_numbers(gm, function, torch.randn(3, 5), torch.randn(3, 5))


def test_compiled() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b, c = x.split(2, 1)
        joined = torch.cat([a, b, c], 1)
        both = torch.cat([torch.cat([x, y], 1), a], 1)
        return joined, both, both[:, 6:12] * 2, joined.t() @ y, both[:, 13:]

    got = check(program, X, Y)
    assert got[0].data_ptr() != X.data_ptr()
