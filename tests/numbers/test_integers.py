"""Integers at the ends of their range: overflow, shifts, division, and floats that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bitwise import assert_same

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _ends(dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    # Several vectors and a tail. Without the least value at 32 and 64 bits: eager's truncating division of it by -1
    # ends the process.
    low = info.min if info.bits < 32 else info.min + 1
    return torch.tensor([low, info.max, info.max - 1, 0, 1, info.max // 2 + 1, 7, low + 1] * 9, dtype=dtype)


def _arithmetic(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x + 1, x - 2, x * x, -x, x.abs(), x + x.flip(0), x.square(), x**3, ~x, x.sign(), x.clamp(0, 5),
        x.sum(dtype=x.dtype), x.sum(), x.prod(), x.cumsum(0), x.amax(), x.amin(), x.argmax(), x.argmin(),
        x < 100, x > 0, x == 7, x.float(), x.double(), x.half(), x.bfloat16(), x.bool(),
    )  # fmt: skip


def _division(x: Tensor) -> tuple[Tensor, ...]:
    found = []
    for divisor in (3, 1, 7) if x.dtype == torch.uint8 else (3, -3, 1, -1, 7):
        found += [x // divisor, x % divisor, torch.fmod(x, divisor), torch.div(x, divisor, rounding_mode="trunc")]
    return tuple(found)


@pytest.mark.parametrize("dtype", _INTEGERS, ids=str)
@pytest.mark.parametrize("function", [_arithmetic, _division])
def test_arithmetic_wraps_as_in_eager(function: Callable[[Tensor], tuple[Tensor, ...]], dtype: torch.dtype) -> None:
    assert_same(function, lambda: [_ends(dtype)])


@pytest.mark.parametrize("dtype", _INTEGERS, ids=str)
def test_shifts_by_as_much_as_the_width_and_more(dtype: torch.dtype) -> None:
    bits = torch.iinfo(dtype).bits
    amounts = (0, 1, bits - 1, bits, bits + 1, 100) + (() if dtype == torch.uint8 else (-1,))

    def program(x: Tensor, by: Tensor) -> tuple[Tensor, ...]:
        return (*(x << n for n in amounts), *(x >> n for n in amounts), x << by, x >> by)

    assert_same(program, lambda: [_ends(dtype), torch.tensor((list(amounts) * 72)[:72], dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "divide",
    [
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: torch.fmod(x, y),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    ],
    ids=["floor", "remainder", "fmod", "trunc"],
)
def test_division_by_a_tensor_with_and_without_zeros(
    divide: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return divide(x, y) + 1

    compiled = torch.compile(program, backend="kiln", dynamic=False, options={"fallback": False})
    x, good = _ends(dtype), torch.tensor([1, 2, 5] * 24, dtype=dtype)
    bad = good.clone()
    bad[70] = 0
    for _ in range(2):
        assert torch.equal(compiled(x, good), program(x, good))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            program(x, bad)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            compiled(x, bad)


def test_division_by_the_number_zero() -> None:
    x = torch.arange(5)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.compile(lambda x: x // 0, backend="kiln", options={"fallback": False})(x)


@pytest.mark.parametrize("source", _FLOATS, ids=str)
def test_floats_that_do_not_fit_an_integer(source: torch.dtype) -> None:
    values = [
        0.0, -0.0, 1.5, -1.5, 2.999, float("nan"), float("inf"), -float("inf"), 255.0, 256.0, 300.0, -1.0, -129.0,
        65536.0, 2147483647.0, 2147483648.0, 2147483653.0, -2147483648.0, -2147483904.0, 3000000007.0, -3000000007.0,
        1e10 + 7, -1e10 - 7, 9.3e18, 1e19, -1e19, 1e-40, 2.0**62,
    ]  # fmt: skip

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        found = [t.to(d) for t in (x, y, y.t()) for d in (*_INTEGERS, torch.bool)]
        return (*found, *(x.to(d) * 2 for d in _INTEGERS))

    wide = torch.tensor(values, dtype=torch.float64).to(source)
    assert_same(program, lambda: [wide.clone(), wide.repeat(6).view(6, -1)])
    assert_same(program, lambda: [wide[5].clone(), wide[:7].view(1, 7)])
