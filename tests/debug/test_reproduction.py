"""Inputs that a file writes as text are those that the program had: bits, sizes, strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchkiln.debug import reproduction
from torchkiln.debug.minify import _random_inputs
from torchkiln.graph.eager_run import copies_of
from torchkiln.graph.program_text import file_text, input_text

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


def _inputs_of_file(inputs: list[torch.Tensor], **options: bool) -> list[torch.Tensor]:
    graph = torch.fx.symbolic_trace(lambda x, y, z: (x.add_(1), y * 2, z))
    names: dict[str, object] = {"__name__": "file"}
    exec(file_text(graph, inputs, failure="", **options), names)
    made = names["inputs"]()  # type: ignore[operator]
    assert [(one.dtype, one.shape, one.stride(), one.requires_grad) for one in made] == [
        (one.dtype, one.shape, one.stride(), one.requires_grad) for one in inputs
    ]
    return list(made)


def _shown(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where ``other`` changes when everything in ``one`` is written."""
    before = other.detach().clone()
    with torch.no_grad():
        one.fill_(1 if one.dtype is torch.bool else 77)
    return other.detach() != before


_MEMORY = torch.arange(24.0)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        _MEMORY,  # the same tensor
        _MEMORY[5:20:3],
        _MEMORY.view(4, 6).t(),
        _MEMORY.view(4, 6)[1:3, 2].expand(3, 2),
        _MEMORY.view(torch.int32)[9:11],
        _MEMORY.view(torch.float64)[2:],
        _MEMORY[20:].detach().requires_grad_(),  # behind all that is written
    ],
    ids=lambda other: f"{other.dtype} {list(other.shape)}",
)
def test_inputs_that_share_memory_share_it_in_a_file(other: torch.Tensor, values: bool) -> None:
    given = [_MEMORY[2:18], other, torch.ones(3)]
    made = _inputs_of_file(given, values=values)
    if values:
        assert all(torch.equal(one, known) for one, known in zip(made, given, strict=True))
    expected = copies_of(given)
    for copies in (made, expected):
        with torch.no_grad():
            copies[0].zero_()
    assert torch.equal(_shown(made[0], made[1]), _shown(expected[0], expected[1]))
    assert not _shown(made[0], made[2]).any()


def test_the_random_inputs_that_minify_tries_are_those_of_the_file() -> None:
    given = [_MEMORY[2:18], _MEMORY.view(4, 6).t(), torch.ones(3)]
    tried, written = _random_inputs(given), _inputs_of_file(given)
    assert all(torch.equal(one, other) for one, other in zip(tried, written, strict=True))
    assert torch.equal(_shown(tried[0], tried[1]), _shown(written[0], written[1]))
