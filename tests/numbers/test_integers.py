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
    # Several vectors and a tail.
    low = info.min
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
        found += [x // divisor, x % divisor, torch.fmod(x, divisor)]
        if divisor != -1:  # eager's truncating division of the least integer by it ends the process
            found.append(torch.div(x, divisor, rounding_mode="trunc"))
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


_DIVISIONS: dict[str, Callable[..., Tensor]] = {
    "floor": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": lambda x, y: torch.fmod(x, y),
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


def _wrapped(name: str, a: int, b: int, dtype: torch.dtype) -> int:
    """The division of whole numbers, and the bits of its result that the type has."""
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    value = {"floor": a // b, "remainder": a % b, "fmod": a - quotient * b, "trunc": quotient}[name]
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min


@pytest.mark.parametrize(
    ("dtype", "dynamic"), [*((dtype, False) for dtype in _INTEGERS), (torch.int32, True), (torch.int64, True)]
)
def test_every_division_of_the_ends_of_the_range_wraps(dtype: torch.dtype, dynamic: bool) -> None:
    """The least number by -1 among them, at which machines and eager's truncating division end the process."""
    info = torch.iinfo(dtype)
    ends = [info.min, info.min + 1, info.min // 2, -7, -3, -1, 0, 1, 3, 7, info.max // 3, info.max - 1, info.max]
    values = sorted({value for value in ends if value >= info.min})
    pairs = [(a, b) for a in values for b in values if b != 0]
    left, right = (torch.tensor(side, dtype=dtype) for side in zip(*pairs, strict=True))
    numbers = [3, 1] if dtype == torch.uint8 else [3, 1, -1, -3]

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        least = torch.full_like(x, info.min)
        by_tensor = [divide(x, y) for divide in _DIVISIONS.values()]
        by_number = [divide(x, number) for number in numbers for divide in _DIVISIONS.values()]
        of_constants = [divide(least, torch.full_like(x, numbers[-2])) for divide in _DIVISIONS.values()]
        by_one = [divide(x, y[-1]) for divide in _DIVISIONS.values()]
        return (*by_tensor, *by_number, *of_constants, *by_one)

    compiled = torch.compile(
        program, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False, "adaptive": True}
    )
    results = iter(compiled(left, right))
    constant = [(info.min, numbers[-2])] * len(pairs)
    by_numbers = [[(a, n) for a, _ in pairs] for n in (*numbers, info.max)]
    for operands in (pairs, *by_numbers[:-1], constant, by_numbers[-1]):
        for name in _DIVISIONS:
            got, wanted = next(results), torch.tensor([_wrapped(name, a, b, dtype) for a, b in operands], dtype=dtype)
            wrong = [(*operands[k], int(got[k])) for k in (got != wanted).nonzero().flatten().tolist()]
            assert not wrong, f"{name}: {wrong[:3]}"


def test_the_least_integer_by_minus_one_is_survived_by_default() -> None:
    """With the settings a user has, under which a graph is timed in eager too."""
    x = torch.full((37,), torch.iinfo(torch.int64).min)
    run = torch.compile(_DIVISIONS["trunc"], backend="kiln")
    assert torch.equal(run(x, torch.full_like(x, -1)), x)
    assert torch.equal(run(x, -1), x)


def test_a_number_read_from_a_tensor_divides_unless_it_is_zero() -> None:
    def program(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        number = n.item()
        return x // number, x % number, number // (x * 2 + 1), number % (x * 2 + 1), 7 % (x * 2 + 1)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(program, backend="kiln", fullgraph=True, options={"fallback": False})
        x = torch.arange(-9, 9)
        for n in (3, -1, -4, 2**40):
            for got, wanted in zip(compiled(x, torch.tensor(n)), program(x, torch.tensor(n)), strict=True):
                assert torch.equal(got, wanted)
        for run in (program, compiled):
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                run(x, torch.tensor(0))


def test_nothing_is_refused_where_nothing_is_divided() -> None:
    assert_same(lambda x, y: (x // y, y % x), lambda: [torch.zeros(0, dtype=torch.int64), torch.tensor(0)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("divide", _DIVISIONS.values(), ids=_DIVISIONS)
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
