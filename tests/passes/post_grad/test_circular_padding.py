"""Circular padding as torch writes it becomes a gather; what only looks like it stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.dynamic.test_shapes import check_at_sizes
from tests.lowering.against_eager import DTYPES, capture, check, layouts, specimen
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln.passes.post_grad.circular_padding import gather_circular_padding

aten = torch.ops.aten
X = torch.arange(24.0).reshape(4, 6)


def _pad(*widths: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.pad(x, widths, mode="circular")


def test_one_gather_for_each_dimension() -> None:
    x = torch.randn(1, 2, 4, 6)
    gm = capture(_pad(2, 1, 0, 3), [x])
    assert apply(gather_circular_padding, gm)
    lines = calls(gm)
    assert not [line for line in lines if "scatter" in line or "new_empty" in line]
    assert len([line for line in lines if "_unsafe_index.Tensor(" in line]) == 2
    assert "arange_start_step = arange.start_step(0, 7, 1, torch.int64, cpu, False)" in lines
    assert "remainder_scalar = remainder.Scalar(arange_start_step, 4)" in lines
    same_numbers(gm, _pad(2, 1, 0, 3), x)


def _stored(x: Tensor, *stores: tuple[slice, slice]) -> Tensor:
    """Six columns of memory with ``x`` in the middle four, then parts of it stored into others, as ATen calls."""
    memory = aten.new_empty.default(x, [4, 8])
    result = aten.slice_scatter.default(memory, x, 1, 1, 7)
    for into, part in stores:
        result = aten.slice_scatter.default(
            result, aten.slice.Tensor(result, 1, part.start, part.stop), 1, into.start, into.stop
        )
    return result


AROUND = ((slice(0, 1), slice(6, 7)), (slice(7, 8), slice(1, 2)))


def test_stores_of_parts_of_the_result_are_padding() -> None:
    gm = traced(lambda x: _stored(x, *AROUND), X)
    assert apply(gather_circular_padding, gm)
    assert not [line for line in calls(gm) if "scatter" in line]
    same_numbers(gm, lambda x: _stored(x, *AROUND), X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _stored(x, (slice(0, 1), slice(5, 6)), (slice(7, 8), slice(1, 2))),  # the last column but one
        lambda x: _stored(x, (slice(0, 1), slice(1, 2)), (slice(7, 8), slice(6, 7))),  # both edges repeated
        lambda x: _stored(x, *AROUND, (slice(3, 4), slice(2, 3))),  # something else in the middle
        lambda x: aten.slice_scatter.default(_stored(x, *AROUND), aten.sin.default(x), 1, 0, 6),  # another source
        lambda x: aten.slice_scatter.default(_stored(x, *AROUND), aten.slice.Tensor(x, 1, 0, 4), 1, 0, 8, 2),  # steps
        lambda x: aten.mul.Tensor(_stored(x, AROUND[0]), 0.0).nan_to_num(0.0, 0.0, 0.0),  # a column that is not set
    ],
)
def test_other_stores_stay(function: Callable[..., Any]) -> None:
    gm = traced(function, X)
    apply(gather_circular_padding, gm)
    assert [line for line in calls(gm) if "scatter" in line]
    same_numbers(gm, function, X)


def test_a_source_that_is_written_later_is_read_before() -> None:
    def padded(x: Tensor) -> Tensor:
        found = _stored(x, *AROUND)
        aten.copy_.default(x, aten.neg.default(x))
        return found

    gm = traced(padded, X)
    apply(gather_circular_padding, gm)
    same_numbers(gm, padded, X)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(DTYPES), st.data())
def test_padding_has_the_values_of_eager(dtype: torch.dtype, data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    sizes = [data.draw(st.integers(1, 9)) for _ in range(dims - 1)] + [data.draw(st.sampled_from([1, 2, 7, 33, 70]))]
    widths: list[int] = []
    for size in reversed(sizes):
        left = data.draw(st.integers(-min(size - 1, 2), size))
        # No wider than what is left of a dimension that is cut at the other end: eager reads unset memory there.
        kept = size + min(left, 0)
        widths += [left, data.draw(st.integers(max(-2, 1 - kept, max(left, 0) - size), kept))]
    x = specimen(dtype, (data.draw(st.sampled_from([0, 1, 3])), 2, *sizes))
    found = layouts(x)
    name = data.draw(st.sampled_from(sorted(found)))
    check(
        {f"{name} {widths}": _pad(*widths)},
        [found[name]],
        exact=True,
        vector_bits=data.draw(st.sampled_from([256, 512])),
    )


def test_channels_last_is_padded_into_rows() -> None:
    x = specimen(torch.float32, (2, 20, 18, 21)).contiguous(memory_format=torch.channels_last)
    check({"padded": _pad(3, 2, 4, 1)}, [x], exact=True)


@pytest.mark.parametrize("widths", [(1, 2), (2, 0), (1, 1, 2, 1)])
def test_padding_of_any_size_is_compiled_once(widths: tuple[int, ...]) -> None:
    check_at_sizes(
        lambda x: F.pad(x.sin(), widths, mode="circular"),
        lambda rows, columns: [torch.randn(2, 3, rows, columns) if len(widths) == 4 else torch.randn(2, rows, columns)],
        graphs=1 if len(widths) == 2 else None,  # torch compares two rows with the padding, and compiles them apart
    )


def test_gradients_are_eagers() -> None:
    x = torch.randn(2, 3, 8, 9, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    compiled = torch.compile(_pad(3, 2, 1, 4), backend="kiln", fullgraph=True, options={"fallback": False})
    result = compiled(x)
    weights = torch.randn_like(result)
    result.backward(weights)
    _pad(3, 2, 1, 4)(other).backward(weights)
    torch.testing.assert_close(x.grad, other.grad)
