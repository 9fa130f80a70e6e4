"""Masks of attention that hide nothing or are causal, made of positions: which go, and which must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.passes.pre_grad.captured import assert_same, capture
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad import remove_dead_code
from torchkiln.passes.pre_grad.constant_masks import use_constant_masks

QUERY = torch.randn(2, 3, 16, 8, requires_grad=True)
SDPA = F.scaled_dot_product_attention

Mask = Callable[[int], torch.Tensor]


def _attention(mask: Mask) -> Callable[[torch.Tensor], torch.Tensor]:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return SDPA(q, q + 1, q * 2, attn_mask=mask(q.shape[-2]))

    return attend


def _simplified(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[Any, Any] | None:
    """The mask and the flag that attention has after the pass; None where the pass changed nothing."""
    gm = capture(function, *inputs, dynamic=dynamic)
    normalize_calls(gm)
    changed = use_constant_masks(gm)
    remove_dead_code(gm)
    if not dynamic:
        assert_same(gm, function, *inputs, rtol=1e-5, atol=1e-5)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch._C._nn.scaled_dot_product_attention)
    assert changed == (call.kwargs.get("attn_mask") is None)
    return (call.kwargs["attn_mask"], call.kwargs.get("is_causal", False)) if changed else None


def _bert(size: int) -> torch.Tensor:
    """As transformers 5.17 makes it for a model that was given no mask."""
    rows = (torch.arange(size) + 0)[None, None, :, None]
    return (rows >= 0).expand(2, -1, size, size)


def _padded_bert(size: int) -> torch.Tensor:
    rows = torch.arange(size)[None, None, :, None]
    columns = torch.arange(size)[None, None, None, :]
    return (rows >= 0) & (columns < size) & torch.ones(2, 1, size, size, dtype=torch.bool)


HIDES_NOTHING: dict[str, Mask] = {
    "positions": _bert,
    "padded": _padded_bert,
    "ones": lambda size: torch.ones(size, size, dtype=torch.bool),
    "zeros": lambda size: torch.zeros(size, size),
    "full": lambda size: torch.full((1, 1, size, size), True),
    "not_zeros": lambda size: ~torch.zeros(size, size, dtype=torch.bool),
    "or": lambda size: (torch.arange(size)[:, None] >= torch.arange(size)) | torch.ones((), dtype=torch.bool),
    "added": lambda size: (1.0 - torch.ones(2, 1, 1, size)) * -3e38,
    "too_small_for_its_dtype": lambda size: torch.full((size, size), 1e-46).triu(1) * -3e38,
    "one_row": lambda size: torch.arange(1, size + 1)[None, :] > 0,
}
CAUSAL: dict[str, Mask] = {
    "compared": lambda size: torch.arange(size)[:, None] >= torch.arange(size)[None, :],
    "swapped": lambda size: torch.arange(size).unsqueeze(0) <= torch.arange(size).unsqueeze(1),
    "strict": lambda size: torch.arange(size) < torch.arange(size)[:, None] + 1,
    "difference": lambda size: torch.arange(size)[:, None] - torch.arange(size) > -1,
    "negated": lambda size: ~(torch.arange(size) > torch.arange(size)[:, None]),
    "tril": lambda size: torch.ones(size, size, dtype=torch.bool).tril(),
    "tril_of_numbers": lambda size: torch.tril(torch.ones(size, size)).bool(),
    "not_triu": lambda size: torch.ones(size, size, dtype=torch.bool).triu(1).logical_not(),
    "infinite": lambda size: torch.full((size, size), float("-inf")).triu(1),
    "where": lambda size: torch.where(torch.ones(size, size, dtype=torch.bool).tril(), 0.0, -3e38),
    "filled": lambda size: torch.zeros(size, size).masked_fill(torch.ones(size, size).triu(1).bool(), -3e38),
    "multiplied": lambda size: (1.0 - torch.ones(size, size).tril()) * -3e38,
    "batched": lambda size: torch.ones(size, size).tril().bool()[None, None].expand(2, 3, size, size),
    "both": lambda size: _bert(size) & (torch.arange(size)[:, None] >= torch.arange(size)),
}


def _written(size: int) -> torch.Tensor:
    mask = torch.ones(size, size, dtype=torch.bool)
    mask[:, -1] = False
    return mask


OTHERS: dict[str, Mask] = {
    "a_column_hidden": lambda size: torch.arange(size)[None, :] >= 1,
    "a_column_hidden_at_the_end": lambda size: torch.arange(size)[None, :] < size - 1,
    "window": lambda size: torch.ones(size, size).tril().triu(-3).bool(),
    "sees_the_next": lambda size: torch.ones(size, size, dtype=torch.bool).tril(1),
    "anti_causal": lambda size: torch.arange(size)[:, None] <= torch.arange(size)[None, :],
    "a_bias": lambda size: torch.full((size, size), 0.5),
    "hides_little": lambda size: torch.full((size, size), -100.0).triu(1),
    "positions_as_a_bias": lambda size: torch.arange(size).float()[None, :].expand(size, size),
    "written": _written,
    "negated_causal": lambda size: ~torch.ones(size, size, dtype=torch.bool).triu(),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", HIDES_NOTHING)
def test_a_mask_that_hides_nothing_goes(name: str, dynamic: bool) -> None:
    assert _simplified(_attention(HIDES_NOTHING[name]), QUERY, dynamic=dynamic) == (None, False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_a_flag(name: str, dynamic: bool) -> None:
    assert _simplified(_attention(CAUSAL[name]), QUERY, dynamic=dynamic) == (None, True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str, dynamic: bool) -> None:
    assert _simplified(_attention(OTHERS[name]), QUERY, dynamic=dynamic) is None


def test_a_causal_mask_of_more_keys_than_queries() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(4)[:, None] >= torch.arange(16)
        return SDPA(q[:, :, :4], q, q, attn_mask=seen)

    assert _simplified(attend, QUERY) == (None, True)


def test_arguments_by_position_are_read() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return SDPA(q, q, q, torch.ones(16, 16, dtype=torch.bool), 0.0, False, scale=0.5)

    assert _simplified(attend, QUERY) == (None, False)
