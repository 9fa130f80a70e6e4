"""Inputs that a file writes as text are those that the program had: bits, sizes, strides."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchkiln.debug import reproduction
from torchkiln.graph.program_text import input_text

_FLOATS = [0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan"), 1e-40]
_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool]


@st.composite
def _inputs(draw: st.DrawFn) -> torch.Tensor:
    """Few different numbers, so that often all are equal; transposed or expanded, long or short or empty."""
    dtype = draw(st.sampled_from(_DTYPES))
    rows, columns = draw(st.sampled_from([0, 1, 2, 40])), draw(st.sampled_from([1, 3]))
    some = st.sampled_from(_FLOATS[: draw(st.integers(1, len(_FLOATS)))])
    drawn = torch.tensor([draw(some) for _ in range(min(rows * columns, 6))], dtype=torch.float64)
    numbers = drawn.repeat(rows * columns)[: rows * columns].reshape(rows, columns)
    if not dtype.is_floating_point and not dtype.is_complex:
        numbers = numbers.nan_to_num(7, 2**40, -(2**40))
    if dtype.is_complex:
        numbers = torch.complex(numbers, numbers.flip(0))
    made = numbers.to(dtype)
    layout = draw(st.sampled_from(["plain", "transposed", "expanded"]))
    return {"plain": made, "transposed": made.t(), "expanded": made.unsqueeze(1).expand(-1, 3, -1)}[layout]


@given(_inputs())
def test_an_input_as_text_is_the_same_to_the_bit(value: torch.Tensor) -> None:
    names = {"tensor": reproduction.tensor, "torch": torch}
    made = eval(input_text(value, values=True), names)
    assert (made.dtype, made.shape, made.stride()) == (value.dtype, value.shape, value.stride())
    parts = [torch.view_as_real(one) if one.dtype.is_complex else one for one in (made, value)]
    both_nan = parts[0].isnan() & parts[1].isnan()
    bits = [torch.where(both_nan, 0, one).reshape(-1).view(torch.uint8) for one in parts]
    assert torch.equal(*bits)
    random = eval(input_text(value), names)
    assert (random.dtype, random.shape, random.stride()) == (value.dtype, value.shape, value.stride())
