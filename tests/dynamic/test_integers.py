"""Integers read from tensors, of any sign and size: arithmetic on them is Python's, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

_LEAST, _MOST = -(2**63), 2**63 - 1
_NUMBERS = (0, 1, 7, -1, -7, 2**40, -(2**62) - 3, _MOST, _LEAST)


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="kiln", fullgraph=True, options={"fallback": False})


def _fits(*numbers: int) -> bool:
    return all(_LEAST <= number <= _MOST for number in numbers)


def test_division_by_known_numbers_of_either_sign_is_pythons() -> None:
    def fn(n: torch.Tensor, x: torch.Tensor) -> Any:
        k = n.item()
        return k // 3, k % 3, k // -3, k % -3, x + k // -5, x * (k % -5), k >> 2, k & 12, k | 3, k ^ 5

    compiled = _compiled(fn)
    for number in _NUMBERS:
        found, expected = (run(torch.tensor(number), torch.ones(3)) for run in (compiled, fn))
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other)


def _assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def test_division_of_two_numbers_is_pythons_with_its_errors() -> None:
    def fn(n: torch.Tensor, m: torch.Tensor, x: torch.Tensor) -> Any:
        return n.item() // m.item(), n.item() % m.item(), x + n.item() % m.item()

    compiled = _compiled(fn)
    for n, m in ((7, 2), *product(_NUMBERS, _NUMBERS)):
        arguments = torch.tensor(n), torch.tensor(m), torch.ones(3, dtype=torch.float64)
        if m == 0:
            with pytest.raises(ZeroDivisionError, match="integer division or modulo by zero"):
                compiled(*arguments)
        elif not _fits(n // m):
            with pytest.raises(OverflowError, match="an integer of more than 64 bits"):
                compiled(*arguments)
        else:
            quotient, rest, total = compiled(*arguments)
            assert (quotient, rest) == (n // m, n % m)
            torch.testing.assert_close(total, arguments[2] + n % m, rtol=0, atol=0)


def test_results_beyond_64_bits_raise_and_what_is_in_between_may_be_larger() -> None:
    def fn(n: torch.Tensor, x: torch.Tensor) -> Any:
        k = n.item()
        return k * 4 - k * 3 + 5, k * 4 // 8, x + k * 2

    def plain(k: int) -> tuple[int, int, int]:
        return k + 5, k * 4 // 8, k * 2

    compiled = _compiled(fn)
    for number in (*_NUMBERS, 2**61, -(2**62), 2**62 - 1):
        arguments = torch.tensor(number), torch.ones(3, dtype=torch.float64)
        if _fits(*plain(number)):
            first, second, total = compiled(*arguments)
            assert (first, second) == plain(number)[:2]
            torch.testing.assert_close(total, arguments[1] + number * 2, rtol=0, atol=0)
        else:
            with pytest.raises(OverflowError, match="an integer of more than 64 bits"):
                compiled(*arguments)


@pytest.mark.parametrize("fn", [lambda k: abs(k), lambda k: -k, lambda k: k * k, lambda k: k * 2 > 5])
def test_the_lowest_number_has_no_opposite(fn: Callable[[Any], Any]) -> None:
    compiled = _compiled(lambda n, x: (fn(n.item()), x + 1))
    for number in (-7, 0, 2**31 - 1, -_MOST if fn(-1) == 1 and fn(-2) == 2 else 3):
        assert compiled(torch.tensor(number), torch.ones(2))[0] == fn(number)
    with pytest.raises(OverflowError, match="an integer of more than 64 bits"):
        compiled(torch.tensor(_LEAST), torch.ones(2))


def test_arithmetic_on_a_number_that_is_given_is_checked_too() -> None:
    compiled = torch.compile(lambda k, x: x + k * k, backend="kiln", dynamic=True, options={"fallback": False})
    x = torch.ones(2, dtype=torch.float64)
    for number in (-5, 3, 2**31):
        torch.testing.assert_close(compiled(number, x), x + number * number, rtol=0, atol=0)
    with pytest.raises(OverflowError):
        compiled(-(2**40), x)


def test_a_float_becomes_an_integer_as_in_python() -> None:
    def fn(n: torch.Tensor, x: torch.Tensor) -> Any:
        k = int(n.item())
        return k * 1, x + k

    compiled = _compiled(fn)
    for number in (2.7, -2.7, 0.0, 2.0**62, -(2.0**63)):
        k, total = compiled(torch.tensor(number, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
        assert k == int(number)
        assert total.tolist() == [float(int(number))] * 2
    for number, error in ((float("nan"), ValueError), (float("inf"), OverflowError), (-1e30, OverflowError)):
        with pytest.raises(error):
            compiled(torch.tensor(number, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))


def test_pieces_as_long_as_numbers_say() -> None:
    def fn(x: torch.Tensor, sizes: torch.Tensor) -> Any:
        first, second = x.split(sizes.tolist())
        return first * 2, second + 1, sizes[0].item() // 2

    compiled = _compiled(fn)
    for sizes in ([3, 4], [7, 0], [0, 7]):
        x = torch.randn(7, 3)
        for found, expected in zip(compiled(x, torch.tensor(sizes)), fn(x, torch.tensor(sizes)), strict=True):
            _assert_equal(found, expected)
