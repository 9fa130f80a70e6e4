"""Numbers on the CPU in kernels of a card: their bytes are given at each launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from tests.gpu.emulated_card import HOPPER, emulated

# A card that is emulated and has tensors of its own: those that the graph was traced with on "cuda".
BESIDE_THE_CPU = replace(HOPPER, takes_all=False)
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool


def compiled(function: Callable[..., Any], on_card: torch.Tensor, *numbers: torch.Tensor) -> Callable[..., Any]:
    """A function of a tensor of the card and numbers of the CPU; the real tensors are all of the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty_like(on_card, device="cuda"), *(torch.empty_like(number) for number in numbers)]
    graph = make_fx(function)(*given)
    run = torchkiln.compile_fx_inner(
        graph, given, is_inference=True, settings=torchkiln.Settings(fallback=False, cache=False)
    )
    return lambda *arguments: run(list(arguments))[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_every_dtype_reach_kernels(dtype: torch.dtype) -> None:
    x = torch.randn(3, 40)
    with emulated(BESIDE_THE_CPU) as driver:
        run = compiled(lambda x, s: x * s + s, x, torch.zeros((), dtype=dtype))
        for value in (1, 0, 3) if dtype != torch.bool else (True, False):
            s = torch.tensor(value, dtype=dtype)
            torch.testing.assert_close(run(x, s), x * s + s)
    assert len(driver.launches) >= 2


def test_negative_numbers_and_nan_keep_their_bits() -> None:
    x = torch.randn(40)
    with emulated(BESIDE_THE_CPU):
        numbers = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        run = compiled(lambda x, s, t: torch.where(x > 0, s, -s) + t, x, *numbers)
        for s, t in ((-1.5, -3), (float("nan"), 2**40), (float("-inf"), 7)):
            given = torch.tensor(s), torch.tensor(t)
            expected = torch.where(x > 0, given[0], -given[0]) + given[1]
            torch.testing.assert_close(run(x, *given), expected, equal_nan=True)
