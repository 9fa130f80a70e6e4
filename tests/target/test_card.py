"""Cards as torch describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from torchkiln.target.card import Card, _described


@pytest.fixture
def allow() -> Iterator[Callable[[str], None]]:
    """Sets the precision of float32 matmuls of cards alone, as torch's own page on it says."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def allow(precision: str) -> None:
        matmul.fp32_precision = precision

    yield allow
    matmul.fp32_precision = before


def _properties(**more: int) -> SimpleNamespace:
    return SimpleNamespace(major=9, minor=0, multi_processor_count=132, **more)


@pytest.mark.parametrize(("precision", "tf32"), [("none", False), ("ieee", False), ("tf32", True)])
def test_tf32_is_read_where_users_allow_it(precision: str, tf32: bool, allow: Callable[[str], None]) -> None:
    """Once it is set so, asking torch for the precision of all devices raises."""
    allow(precision)
    assert _described(_properties()).tf32 is tf32


def test_what_torch_does_not_tell_of_a_card_is_assumed() -> None:
    """torch for CUDA 13 does not tell the clock of the memory."""
    assert _described(_properties()) == Card(9, 0, processors=132, shared_bytes=48 << 10, bandwidth=0)
    full = _properties(memory_clock_rate=3_201_000, memory_bus_width=6144, shared_memory_per_block_optin=227 << 10)
    assert _described(full) == Card(9, 0, processors=132, shared_bytes=227 << 10, bandwidth=4_916_736_000_000)
