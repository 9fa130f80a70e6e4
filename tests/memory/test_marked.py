"""Tensors that are not what their memory says: negated or conjugated by a mark, or placed anywhere in a storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="kiln", fullgraph=True, options={"fallback": False})


def _marked(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    if kind == "dense":
        return torch._neg_view(torch.randn(shape))
    return torch.randn(shape, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize("kind", ["dense", "every other element"])
def test_a_negated_input_is_read_negated(kind: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2 + x

    compiled, x = _compiled(fn), _marked((3, 4), kind)
    assert x.is_neg()
    torch.testing.assert_close(compiled(x), fn(x))
    plain = torch.randn(3, 4)
    torch.testing.assert_close(compiled(plain), fn(plain))
    torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.parametrize("kind", ["dense", "every other element"])
def test_a_negated_gradient_is_read_negated(kind: str) -> None:
    compiled = _compiled(lambda x: x.sin() * 2)
    x = torch.randn(3, 4, requires_grad=True)
    for gradient in (torch.randn(3, 4), _marked((3, 4), kind), torch.randn(3, 4)):
        (found,) = torch.autograd.grad(compiled(x), x, gradient)
        (expected,) = torch.autograd.grad(x.sin() * 2, x, gradient)
        torch.testing.assert_close(found, expected)


def test_a_conjugated_input_is_read_conjugated() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.view_as_real(x.resolve_conj()) * 2, x.real + x.imag

    x = torch.randn(5, dtype=torch.complex64).conj()
    torch.testing.assert_close(_compiled(fn)(x), fn(x))


def test_as_strided_counts_from_the_start_of_the_storage_wherever_the_input_lies_in_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (3,), (1,), 5) + 1

    compiled, base = _compiled(fn), torch.arange(20.0)
    for start in (5, 3, 9):
        x = base[start : start + 10]
        torch.testing.assert_close(compiled(x), fn(x))


def test_as_strided_without_an_offset_starts_where_its_argument_does() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (3, 1)) + 1

    compiled, base = _compiled(fn), torch.arange(20.0)
    for start in (5, 3, 9):
        torch.testing.assert_close(compiled(base[start : start + 10]), fn(base[start : start + 10]))


def test_as_strided_reads_between_the_elements_of_an_input() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (4,), (1,)) * 2

    compiled, base = _compiled(fn), torch.arange(20.0)
    for start in (2, 4):
        x = base[start::3]
        x = x[:5]
        torch.testing.assert_close(compiled(x), fn(x))


def test_as_strided_of_a_view_of_an_input() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x[2:6], (3,), (2,), 4) * 2

    compiled, base = _compiled(fn), torch.arange(20.0)
    for start in (2, 4):
        x = base[start : start + 8]
        torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_by_as_strided_is_a_view_of_the_input(dynamic: bool) -> None:
    def fn(x: torch.Tensor, offset: int) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 2), offset)

    compiled = torch.compile(fn, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False})
    for offset in (1, 3, 0):
        x = torch.arange(12.0)[2:8]
        found = compiled(x, offset)
        torch.testing.assert_close(found, fn(x, offset))
        assert found.storage_offset() == offset
        x.fill_(100.0)
        torch.testing.assert_close(found, fn(x, offset))


def test_as_strided_is_read_before_the_input_is_written_to() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        seen = torch.as_strided(x, (3,), (2,), 4) * 2
        x.mul_(100)
        return seen

    base = torch.arange(20.0)
    first, second = base.clone()[3:15], base.clone()[3:15]
    torch.testing.assert_close(_compiled(fn)(first), fn(second))
    torch.testing.assert_close(first, second)
