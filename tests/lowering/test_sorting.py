"""Sorting: the rows of native code are those of eager's stable sort to the bit, and all else goes to torch.

Eager leaves the order of equal elements open unless it is asked for a stable sort; native code is always stable.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchkiln

HALVES_AND_SINGLES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-40, -1e-40, 6e4, 3.0]


def _ascending(x: Tensor) -> tuple[Tensor, Tensor]:
    values, positions = torch.sort(x, dim=-1, stable=True)
    return values, positions


def _ascending_somehow(x: Tensor) -> tuple[Tensor, Tensor]:
    values, positions = torch.sort(x)
    return values, positions


def _descending(x: Tensor) -> tuple[Tensor, Tensor]:
    values, positions = torch.sort(x, dim=-1, descending=True, stable=True)
    return values, positions


def _bits(x: Tensor) -> Tensor:
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def _check(function: object, x: Tensor, *, native: bool = True, like: object = None) -> None:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    compiled = torch.compile(function, backend="kiln", options={"fallback": False})  # type: ignore[call-overload]
    values, positions = compiled(x)
    expected = (like or function)(x)  # type: ignore[operator]
    assert torch.equal(positions, expected[1])
    assert torch.equal(_bits(values), _bits(expected[0]))
    assert (values.stride(), positions.stride()) == (expected[0].stride(), expected[1].stride())
    assert any("sort" in name for name in torchkiln.stats().extern_calls) == (not native)


@pytest.mark.parametrize("function", [_ascending, _descending])
@pytest.mark.parametrize("dtype", HALVES_AND_SINGLES)
@pytest.mark.parametrize("shape", [(3, 1), (5, 8), (2, 3, 32), (4, 33), (2, 1000), (1, 70000), (500,), (3, 0), (0, 4)])
def test_rows_with_ties_zeros_and_nans(shape: tuple[int, ...], dtype: torch.dtype, function: object) -> None:
    torch.manual_seed(1)
    x = torch.randn(shape).mul(4).round().div(2)  # many ties
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
    _check(function, torch.where(torch.rand(shape) < 0.3, special, x).to(dtype))


@pytest.mark.parametrize("dtype", HALVES_AND_SINGLES)
def test_every_bit_of_a_key_counts(dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (2, 5000)).to(torch.int32)
    else:
        bits = torch.arange(-(2**15), 2**15).to(torch.int16)[torch.randperm(2**16)].view(2, -1)
    _check(_ascending, bits.view(dtype))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(width=32, allow_nan=True), max_size=80), st.booleans())
def test_any_numbers(numbers: list[float], descending: bool) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    function = _descending if descending else _ascending
    compiled = torch.compile(function, backend="kiln", options={"fallback": False}, dynamic=False)
    expected = function(x)
    torch._dynamo.reset()
    values, positions = compiled(x)
    assert torch.equal(positions, expected[1])
    assert torch.equal(_bits(values), _bits(expected[0]))


def test_equal_elements_keep_their_order_without_being_asked_to() -> None:
    _check(_ascending_somehow, torch.randint(4, (3, 500)).float(), like=_ascending)


def test_halves_in_any_order_are_left_to_torch() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _check(_ascending_somehow, torch.randint(4, (3, 500)).to(dtype), native=False)


def test_parts_of_a_tensor_and_computed_values() -> None:
    x = torch.randn(6, 40)
    _check(_ascending, x[2:5])
    _check(lambda x: _descending(x.abs() * 2), x)
    _check(lambda x: _ascending(x[1:, :]), x)


def test_what_native_code_does_not_take_goes_to_torch() -> None:
    x = torch.randn(6, 40)
    _check(_ascending, x.double(), native=False)
    _check(_ascending, x.T, native=False)
    _check(lambda x: torch.sort(x, dim=0, stable=True), x, native=False)
    _check(_ascending, torch.randn(6, 80)[:, ::2], native=False)


def test_a_number_alone() -> None:
    _check(lambda x: torch.sort(x), torch.tensor(2.0), native=False)


def test_rows_of_which_the_number_is_known_at_run_time() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(_descending, backend="kiln", options={"fallback": False}, dynamic=True)
    for rows in (3, 5, 200):
        x = torch.randn(rows, 300)
        torch._dynamo.mark_static(x, 1)
        torch.testing.assert_close(compiled(x), _descending(x), rtol=0, atol=0)


def test_gradients_go_back_to_where_values_were() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 50, requires_grad=True)
    weights = torch.randn(4, 50)
    compiled = torch.compile(_descending, backend="kiln", options={"fallback": False})
    (mine,) = torch.autograd.grad((compiled(x)[0] * weights).sum(), x)
    (eagers,) = torch.autograd.grad((_descending(x)[0] * weights).sum(), x)
    torch.testing.assert_close(mine, eagers, rtol=0, atol=0)


def test_one_thread_sorts_all_rows_where_no_more_are_allowed() -> None:
    x = torch.randn(64, 3000)
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch._dynamo.mark_static(x, 1)
        compiled = torch.compile(
            _ascending, backend="kiln", options={"fallback": False, "threads": 1}, dynamic=dynamic
        )
        torch.testing.assert_close(compiled(x), _ascending(x), rtol=0, atol=0)


def test_threads_share_rows() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        _check(_ascending, torch.randn(64, 3000))
    finally:
        torch.set_num_threads(threads)
