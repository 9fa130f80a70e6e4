"""Gradients through complex numbers: Python's own among the operands, parts, conjugates, magnitudes, angles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("everything_compiled")

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "a product": lambda x: x * 2j,
    "a product and a sum": lambda x: (1 + 2j) * x + 1j,
    "a difference": lambda x: 2j - x,
    "a quotient": lambda x: x / 2j + 1j / (x + 3),
    "a power": lambda x: (x + 3) ** (1 + 1j),
    "parts": lambda x: (x * 2j).real * 3 + (x * (1 + 2j)).imag,
    "conjugates": lambda x: (x * (1 + 2j)).conj() * 1j,
    "a part of a conjugate": lambda x: -(x * (1 + 2j)).conj().imag * 1j,
    "a conjugate in memory": lambda x: torch.conj_physical(x * 1j).conj().resolve_conj() * 2j,
    "magnitudes and angles": lambda x: (x * (1 + 2j)).abs() * (x * 1j + 1).conj().angle(),
    "signs": lambda x: (x * (1 + 2j)).sgn(),
    "functions": lambda x: (x * 1j).exp() + (x * 1j + 3).sqrt().log() - (x * 1j + 0.3).tanh(),
    "products of tensors": lambda x: ((x * 2j) * (x * 1j + 1)) / (x * (2 + 1j) + 5),
    "products of matrices": lambda x: (x * 1j) @ (x.t() * (1 + 1j)),
    "sums": lambda x: (x * 1j).mean(0).abs() + (x * 2j).sum().real,
    "views": lambda x: torch.cat([(x * 1j)[1:, ::2].conj(), torch.view_as_real(x * 2j)[..., 1].sum() * x[:1, :2]]),
    "in place": lambda x: (x * 1j).mul_(2j).add_(1j).real,
    "a choice": lambda x: torch.where(x.real > 0, x * 1j, x * 2j),
    "made of parts": lambda x: torch.complex(x.real * 1.0, x.real * 2) * 1j + torch.polar(x.abs() + 1, x.real),
}


def _check(program: Callable[[Tensor], Tensor], compiled: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, dtype=dtype)
    for _ in range(2):
        mine, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = compiled(mine), program(eagers)
        torch.testing.assert_close(result.resolve_conj(), expected.resolve_conj())
        gradient = torch.randn_like(expected.detach().resolve_conj())
        result.backward(gradient)
        expected.backward(gradient)
        torch.testing.assert_close(mine.grad, eagers.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(compile_strictly: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    _check(PROGRAMS[name], compile_strictly(PROGRAMS[name]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16], ids=str)
def test_a_complex_number_leaves_the_precision_as_it_is(
    compile_strictly: Callable[..., Any], dtype: torch.dtype
) -> None:
    _check(PROGRAMS["a product"], compile_strictly(PROGRAMS["a product"]), dtype)
