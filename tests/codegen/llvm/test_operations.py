"""Conversions and activations of bfloat16 in generated code, for every number there is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.against_eager import compiled

ALL = torch.arange(2**16).int().to(torch.int16).view(torch.bfloat16)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Of any NaN the same."""
    return x.view(torch.int16).masked_fill(x.isnan(), 0x7FC0)


@pytest.mark.parametrize("bits", [128, 256, 512])
def test_rounding_to_bfloat16_has_eager_s_bits(bits: int) -> None:
    """Every upper half of a float32, denormals and NaN too, with what decides how it is rounded."""
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int64)
    words = (torch.arange(2**16)[:, None] << 16 | lower).flatten()
    x = words.to(torch.int32).view(torch.float32)
    for count in (x.numel(), x.numel() - 13):  # with a tail
        (found,) = compiled(lambda x: (x.bfloat16(),), [x[:count]], vector_bits=bits)(x[:count])
        assert torch.equal(_bits(found), _bits(x[:count].bfloat16()))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 31, 33, 65])
def test_rounding_of_few_numbers_has_eager_s_bits(count: int) -> None:
    numbers = [1.00390625, -1.01171875, float("nan"), 1e-40, -3e-39, float("-inf"), 3.3961775e38, -0.0]
    x = torch.tensor(numbers * 9)[:count]
    (found,) = compiled(lambda x: (x.bfloat16(),), [x])(x)
    assert torch.equal(_bits(found), _bits(x.bfloat16()))


def test_a_nan_of_any_payload_rounds_to_nan() -> None:
    x = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x7FFFFF, 0x7FC00000] * 20).to(torch.int32).view(torch.float32)
    (found,) = compiled(lambda x: (x.bfloat16(),), [x])(x)
    assert found.isnan().all()


@pytest.mark.parametrize("lanes", [1, 7, 64])
def test_every_bfloat16_widens_to_itself(lanes: int) -> None:
    x = ALL[: ALL.numel() // lanes * lanes].reshape(-1, lanes)
    (found,) = compiled(lambda x: (x.float(),), [x])(x)
    assert torch.equal(found.nan_to_num(nan=7.0).view(torch.int32), x.float().nan_to_num(nan=7.0).view(torch.int32))


def test_gelu_of_every_bfloat16_is_as_close_as_eager_s() -> None:
    """In float32 both are off by what erf near -1 loses: 2**-24 of the argument. Then they are rounded once."""
    x, g = ALL[ALL.isfinite()], torch.tensor(1.0).bfloat16()
    results = compiled(lambda x, g: (F.gelu(x), torch.ops.aten.gelu_backward(g.expand_as(x), x)), [x, g])(x, g)
    wide = x.double().requires_grad_()
    exact = F.gelu(wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    eager = (F.gelu(x), torch.ops.aten.gelu_backward(g.expand_as(x), x))
    for found, theirs, right in zip(results, eager, (exact.detach(), slope), strict=True):
        ours, others = ((value.double() - right).abs() for value in (found, theirs))
        lost = 2.0**-24 * x.double().abs().clamp(1, 8)
        rounding = (right.bfloat16().double() - right).abs()
        assert (ours <= torch.maximum(others, rounding) + 2 * lost).all()
        assert ours[x.abs() < 8].max() <= others[x.abs() < 8].max() + lost.max()
