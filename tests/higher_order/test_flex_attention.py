"""flex_attention, taken apart into the operators of its definition and compiled with the graph around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.higher_order.against_eager import check

Tensor = torch.Tensor
BIAS = torch.linspace(-1, 1, 2)


def _relative(score: Tensor, _b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + 0.1 * (query - key)


def _per_head(score: Tensor, _b: Tensor, head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
    return torch.tanh(score) * 2 + BIAS[head]


def _causal(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _inputs(heads: int = 2) -> list[Tensor]:
    return [torch.randn(2, 2, 32, 16), torch.randn(2, heads, 32, 16), torch.randn(2, heads, 32, 16)]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("score_mod", [None, _relative, _per_head])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_and_masks(score_mod: Callable[..., Any] | None, causal: bool) -> None:
    mask = create_block_mask(_causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16) if causal else None

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = flex_attention(query * 2, key, value, score_mod=score_mod, block_mask=mask)
        return attended.transpose(1, 2).flatten(2).relu()

    check(function, *_inputs(), tolerance={"rtol": 1e-4, "atol": 1e-5})


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_shared_keys_and_scale() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, scale=0.3, enable_gqa=True)

    check(function, *_inputs(heads=1), tolerance={"rtol": 1e-4, "atol": 1e-5})


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_on_sizes_that_change() -> None:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, score_mod=_relative)

    run = torch.compile(function, backend="kiln", fullgraph=True, dynamic=True, options={"fallback": False})
    for length in (8, 12):
        inputs = [torch.randn(1, 2, length, 16) for _ in range(3)]
        torch.testing.assert_close(run(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)
