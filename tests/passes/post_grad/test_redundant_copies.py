"""Copies that are read through, and copies that matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.higher_order.against_eager import check
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.passes.post_grad.redundant_copies import remove_redundant_copies

aten = torch.ops.aten

X = torch.arange(12.0).reshape(3, 4)
Y = -torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x, y: aten.sin.default(aten.copy.default(x, y)), (X, Y), ["sin = sin.default(y_1)"]),
        (
            lambda x, y: aten.sin.default(aten.slice_scatter.default(x, y, 0, 0, 3)),
            (X, Y),
            ["sin = sin.default(y_1)"],
        ),
        (
            lambda x, y: aten.sin.default(aten.slice_scatter.default(x, aten.slice.Tensor(x, 1, 1, 3), 1, 1, 3)),
            (X, Y),
            ["sin = sin.default(x_1)"],
        ),
        (
            lambda x, y: aten.sin.default(aten.select_scatter.default(x, aten.select.int(x, 1, 2), 1, 2)),
            (X, Y),
            ["sin = sin.default(x_1)"],
        ),
        (  # returned, but of memory nobody else sees
            lambda x, y: aten.slice_scatter.default(x, aten.sin.default(y), 0),
            (X, Y),
            ["sin = sin.default(y_1)"],
        ),
    ],
)
def test_read_through(function: Callable[..., Any], inputs: tuple[Tensor, ...], expected: list[str]) -> None:
    gm = traced(function, *inputs)
    assert apply(remove_redundant_copies, gm)
    assert calls(gm) == expected
    same_numbers(gm, function, *inputs)


def _reads_after_the_write(x: Tensor, y: Tensor) -> Tensor:
    saved = aten.copy.default(y, x)
    aten.copy_.default(x, y)
    aten.copy_.default(y, saved)
    return aten.neg.default(x)


def _returns_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    value = aten.sin.default(y)
    return value, aten.copy.default(x, value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: aten.copy.default(x, y),  # returned: the user may write into it
        lambda x, y: aten.sin.default(aten.copy.default(x, aten.select.int(y, 0, 0))),  # repeated
        lambda x, y: aten.sin.default(aten.copy.default(x, aten._to_copy.default(y, dtype=torch.float64))),
        lambda x, y: aten.sin.default(aten.slice_scatter.default(x, aten.slice.Tensor(y, 0, 0, 2), 0, 0, 2)),
        lambda x, y: aten.sin.default(aten.slice_scatter.default(x, aten.slice.Tensor(x, 0, 1, 3), 0, 0, 2)),
        lambda x, y: aten.sin.default(aten.slice_scatter.default(x, aten.slice.Tensor(y, 0, 0, 3, 2), 0, 0, 3, 2)),
        _reads_after_the_write,
        _returns_both,
    ],
)
def test_left_as_it_is(function: Callable[..., Any]) -> None:
    gm = traced(function, X, Y)
    before = calls(gm)
    assert not apply(remove_redundant_copies, gm)
    assert calls(gm) == before
    same_numbers(gm, function, X, Y)


def test_compiled() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x.clone()
        z[1:3] += 1
        z[:] = z * y
        w = torch.empty_like(x)
        w.copy_(y)
        return z, w

    got = check(program, X, Y)
    assert got[1].data_ptr() != Y.data_ptr()
