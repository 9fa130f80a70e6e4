"""Advice about tensor cores: where float32 matmuls run on a card that has them, once, and nowhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import torchkiln
from tests.gpu.emulated_card import HOPPER, emulated
from torchkiln.errors import AdviceWarning
from torchkiln.frontend import advice
from torchkiln.target import Card


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """How often a matmul of a dtype, compiled twice for a card, gives the advice."""

    def count(card: Card, dtype: torch.dtype) -> int:
        monkeypatch.setattr(advice, "_given", False)
        x = torch.randn(64, 64).to(dtype)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with emulated(card), torchkiln.settings(cache=False, fallback=False):
                for function in (lambda x: x @ x, lambda x: (x @ x).exp()):
                    torch.compile(function, backend="kiln")(x)
        return sum(issubclass(warning.category, AdviceWarning) for warning in found)

    return count


def test_float32_matmuls_without_tensor_cores_give_the_advice_once(advised: Callable[..., int]) -> None:
    assert advised(HOPPER, torch.float32) == 1


@pytest.mark.parametrize(
    ("card", "dtype"),
    [(replace(HOPPER, tf32=True), torch.float32), (replace(HOPPER, major=7), torch.float32), (HOPPER, torch.bfloat16)],
    ids=["allowed", "no such cores", "bfloat16"],
)
def test_other_matmuls_give_no_advice(card: Card, dtype: torch.dtype, advised: Callable[..., int]) -> None:
    assert advised(card, dtype) == 0
