"""Layouts have the strides they claim and the values they were given."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.operators.entry import Call, in_layouts
from benchmarks.operators.layouts import Layout, in_layout

SIZES = st.lists(st.integers(1, 5), max_size=5).map(tuple)


def _numbered(size: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(size), dtype=torch.float32).reshape(size)


@pytest.mark.parametrize(
    ("layout", "size", "strides"),
    [
        (Layout.contiguous, (6, 8), (8, 1)),
        (Layout.transposed, (6, 8), (1, 6)),
        (Layout.transposed, (2, 6, 8), (48, 1, 6)),
        (Layout.every_second, (6, 8), (16, 2)),
        (Layout.broadcast, (6, 8), (0, 1)),
        (Layout.rows, (6, 8), (48, 1)),
        (Layout.channels_last, (2, 3, 4, 5), (60, 1, 15, 3)),
        (Layout.permuted, (2, 3, 4, 5), (60, 5, 15, 1)),
    ],
)
def test_a_layout_has_the_strides_it_claims(layout: Layout, size: tuple[int, ...], strides: tuple[int, ...]) -> None:
    found = in_layout(_numbered(size), layout)
    assert found is not None
    assert found.stride() == strides


@given(SIZES, st.sampled_from(Layout), st.booleans())
def test_a_layout_keeps_sizes_values_and_gradients(size: tuple[int, ...], layout: Layout, gradient: bool) -> None:
    tensor = _numbered(size).requires_grad_(gradient)
    found = in_layout(tensor, layout)
    if found is None:
        assert layout is not Layout.contiguous
        return
    expected = tensor[:1].expand(size) if layout is Layout.broadcast else tensor
    assert torch.equal(found, expected)
    assert found.requires_grad == gradient
    assert found.is_leaf


@given(SIZES, st.sampled_from([layout for layout in Layout if layout is not Layout.contiguous]))
def test_another_layout_is_never_the_contiguous_one(size: tuple[int, ...], layout: Layout) -> None:
    found = in_layout(_numbered(size), layout)
    assert found is None or not found.is_contiguous()


def test_a_call_has_its_first_argument_laid_out_and_all_of_a_list() -> None:
    x, y = torch.zeros(4, 6), torch.zeros(4, 6)
    alone = in_layouts(Call(torch.add, (x, y)), Layout.transposed)
    assert alone is not None
    assert [t.stride() for t in alone.args] == [(1, 4), (6, 1)]
    together = in_layouts(Call(torch.cat, ([x, y],)), Layout.transposed)
    assert together is not None
    assert [t.stride() for t in together.args[0]] == [(1, 4), (1, 4)]


def test_a_call_without_such_a_layout_is_none() -> None:
    assert in_layouts(Call(torch.relu, (torch.zeros(5),)), Layout.transposed) is None
    assert in_layouts(Call(torch.ones, (5,)), Layout.rows) is None
