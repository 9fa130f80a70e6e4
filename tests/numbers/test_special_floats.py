"""Denormals, signs of zero, infinities and NaN: kept where eager keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.bitwise import assert_same

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _special(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    values = [
        *(0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), info.max, -info.max, info.tiny, -info.tiny),
        *(info.smallest_normal / 4, -info.smallest_normal / 8, 0.25, -0.25, 1.5, -2.5),
    ]
    return torch.tensor(values * 5, dtype=torch.float64).to(dtype)


def _one_value(x: Tensor) -> tuple[Tensor, ...]:
    return (
        -x, x.abs(), x.relu(), x * 1, x + 0.0, x - 0.0, x * -1, x.sign(), x.floor(), x.ceil(), x.trunc(), x.round(),
        x.isnan(), x.isinf(), x.isfinite(), x.signbit(), x == 0, x != x, x > 0, x <= 0, x.nan_to_num(), x.clamp(-1, 1),
        x.clamp(min=0.0), x.clamp(max=-0.0), x.to(torch.float64), x.to(torch.bool), x.sqrt(), x.reciprocal(),
        torch.where(x > 0, x, -0.0), x.masked_fill(x != x, -0.0), x.frac(), x.sgn(), torch.threshold(x, 0.0, -0.0),
        torch.nn.functional.hardtanh(x), torch.nn.functional.leaky_relu(x, 0.0), x.square(),
    )  # fmt: skip


def _two_values(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (
        x + y, x - y, x * y, x / y, torch.copysign(x, y), x < y, x >= y, x == y, torch.where(x < y, x, y),
        # Of zeros with two signs eager gives the first or the second, by where the element lies: made one zero here.
        *(f(x, y) + 0.0 for f in (torch.maximum, torch.minimum, torch.fmax, torch.fmin)),
        torch.hypot(x, y).isnan(), torch.div(x, y, rounding_mode="trunc"), torch.div(x, y, rounding_mode="floor"),
        torch.heaviside(x, y), torch.nextafter(x, y) if x.dtype in (torch.float32, torch.float64) else x,
    )  # fmt: skip


def _remainders(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.fmod(y), x.remainder(y), x.fmod(1.5), x.remainder(-2.5)


def _reduced(x: Tensor) -> tuple[Tensor, ...]:
    return (
        *(t + 0.0 for t in (x.amax(0), x.amin(0), x.amax(1), x.amin(1), x.max(1).values, x.min(1).values, x.amax())),
        x.argmax(1), x.argmin(0), x.max(0).indices, x.any(1), x.all(0), x.sort(1).values + 0.0,
        x.clamp(-1, 1).sum(0).isnan(), (x / 4).relu().mean(1).isinf(),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", _FLOATS, ids=str)
def test_functions_of_one_special_value(dtype: torch.dtype) -> None:
    assert_same(_one_value, lambda: [_special(dtype)], precision="eager")
    assert_same(_one_value, lambda: [_special(dtype)[5].clone()], precision="eager")


@pytest.mark.parametrize("dtype", _FLOATS, ids=str)
def test_functions_of_every_pair_of_special_values(dtype: torch.dtype) -> None:
    assert_same(_two_values, lambda: [_special(dtype)[:17, None].clone(), _special(dtype)], precision="eager")


@pytest.mark.parametrize("dtype", _FLOATS, ids=str)
def test_remainders_of_special_values(dtype: torch.dtype) -> None:
    def make() -> list[Tensor]:
        # Where the quotient is beyond the largest number, eager's vectors give NaN and its single elements 0.
        x = _special(dtype)
        small = x.masked_fill(x.isfinite() & (x.abs() > 1e3), 1e3)
        return [small[:17, None].clone(), x.masked_fill((x != 0) & (x.abs() < torch.finfo(dtype).eps), 3)]

    assert_same(_remainders, make, precision="eager")


@pytest.mark.parametrize("dtype", _FLOATS, ids=str)
@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x.nan_to_num(1.0), lambda x: x.clamp(-0.0, 0.0)])
def test_reductions_over_special_values(dtype: torch.dtype, keep: Callable[[Tensor], Tensor]) -> None:
    assert_same(_reduced, lambda: [keep(_special(dtype)).view(17, 5)])
    assert_same(_reduced, lambda: [keep(_special(dtype)).repeat(3).view(3, -1)])


@pytest.mark.parametrize("dtype", _FLOATS, ids=str)
def test_of_zeros_with_two_signs_the_positive_one_is_greater_wherever_it_lies(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0] * 40, dtype=dtype)

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.maximum(x, y), torch.minimum(x, y)

    compiled = torch.compile(program, backend="kiln", options={"fallback": False})
    for view in (lambda t: t, lambda t: t[:17], lambda t: t[::3], lambda t: t[0], lambda t: t.view(8, 10).t()):
        greater, less = compiled(view(x), view(-x))
        assert not greater.signbit().any()
        assert less.signbit().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_of_negative_zeros_and_of_denormals(dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.sum(), x.sum(1), x.mean(0), y.sum(0), y.sum(), x.cumsum(0), y + y, y * 0.5, y.prod(0)

    tiny = torch.finfo(dtype).smallest_normal / 16
    assert_same(program, lambda: [torch.full((3, 70), -0.0, dtype=dtype), torch.full((3, 70), tiny, dtype=dtype)])


@pytest.fixture
def flush() -> Iterator[Callable[[bool], bool]]:
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("flushed", [False, True])
def test_denormals_are_kept_or_flushed_as_the_process_says(flush: Callable[[bool], bool], flushed: bool) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        return x * 0.25, x + x, x * 0.5 - x * 0.25, (x * 0.125).sum(0)

    x = torch.full((3, 70), torch.finfo(torch.float32).smallest_normal)
    compiled = torch.compile(program, backend="kiln", options={"fallback": False})
    for setting in (False, flushed, False):
        if not flush(setting):
            pytest.skip("this processor does not flush denormals")
        for got, wanted in zip(compiled(x), program(x), strict=True):
            assert torch.equal(got, wanted)
