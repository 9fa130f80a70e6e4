"""The backward of attention by small products: gradients are those of attention written out in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchkiln
from torchkiln.native.blas import BF16_GEMM, callable_routines

pytestmark = pytest.mark.skipif(BF16_GEMM not in callable_routines(), reason="this torch has no such BLAS")
_OPERATOR = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _gradients(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = attention(*leaves)
    torch.manual_seed(3)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _written_out(mask: Tensor | None, causal: bool, scale: float | None) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores + mask.double()
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), float("-inf"))
        return scores.softmax(-1).nan_to_num() @ v

    return attention


def _compiled(mask: Tensor | None, causal: bool, scale: float | None) -> Attention:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    return torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale),
        backend="kiln",
        options={"fallback": False, "adaptive": False},
    )


def _tensors(lengths: tuple[int, int], width: int, *, heads_inside: bool) -> list[Tensor]:
    torch.manual_seed(1)
    made = []
    for length in (lengths[0], lengths[1], lengths[1]):
        t = torch.randn(2, length, 3, width) if heads_inside else torch.randn(2, 3, length, width)
        made.append(t.bfloat16().transpose(1, 2) if heads_inside else t.bfloat16())
    return made


@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.parametrize(
    ("lengths", "width", "mask", "causal", "scale"),
    [
        ((16, 16), 8, None, False, None),
        ((16, 16), 8, None, True, None),
        ((40, 24), 16, None, False, 0.3),
        ((7, 33), 64, (1, 1, 7, 33), False, None),
        ((9, 9), 32, (2, 1, 9, 9), False, None),
        ((1, 5), 4, (1, 5), False, None),
    ],
)
def test_gradients(
    lengths: tuple[int, int],
    width: int,
    mask: tuple[int, ...] | None,
    causal: bool,
    scale: float | None,
    heads_inside: bool,
) -> None:
    tensors = _tensors(lengths, width, heads_inside=heads_inside)
    added = None if mask is None else torch.randn(mask).bfloat16()
    mine = _gradients(_compiled(added, causal, scale), tensors)
    called = torchkiln.stats().extern_calls
    assert "aten.bmm.dtype" in called
    assert _OPERATOR not in called
    exact = _gradients(_written_out(added, causal, scale), [t.double() for t in tensors])
    for one, other in zip(mine, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 0.015 * other.norm()


def test_rows_that_see_nothing_have_no_gradient() -> None:
    tensors = _tensors((6, 6), 8, heads_inside=False)
    mask = torch.zeros(6, 6).bfloat16()
    mask[2] = float("-inf")
    mask[4, 1:] = float("-inf")
    mine = _gradients(_compiled(mask, False, None), tensors)
    eagers = _gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), tensors)
    assert torch.equal(mine[0][:, :, 2], torch.zeros(2, 3, 8).bfloat16())
    for one, other in zip(mine, eagers, strict=True):
        assert not one.isnan().any()
        assert (one.double() - other.double()).norm() < 0.015 * other.double().norm()


def test_long_sequences_and_other_dtypes_are_left_to_the_operator() -> None:
    long = [torch.randn(1, 8, 1024, 8).bfloat16() for _ in range(3)]
    exact = [torch.randn(1, 2, 8, 8) for _ in range(3)]
    for tensors in (long, exact):
        _gradients(_compiled(None, False, None), tensors)
        assert _OPERATOR in torchkiln.stats().extern_calls
