"""Linears whose rows are quantized by themselves: torch's operators by token, and torchao's dynamic quantization."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.quantized.layers import Int8Weight
from tests.passes.freezing.quantized.pt2e import compiled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

_ops = torch.ops.quantized_decomposed


class _ByToken(nn.Module):
    def __init__(self, inner: int, outer: int, *, bias: bool = True, per_tensor: bool = False) -> None:
        super().__init__()
        self.weight = Int8Weight((outer, inner), per_tensor=per_tensor)
        self.bias = nn.Parameter(torch.randn(outer)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        scales, zero_points = _ops.choose_qparams_per_token_asymmetric(x, torch.int8)
        given: tuple[Any, ...] = scales, zero_points, -128, 127, torch.int8
        stored = _ops.quantize_per_token(x, *given)
        return F.linear(_ops.dequantize_per_token(stored, *given, torch.float32), self.weight(), self.bias)


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(6, 48), (2, 5, 48), (1, 48)])
def test_rows_with_scales_of_their_own_are_multiplied_as_integers(
    shape: tuple[int, ...], bias: bool, per_tensor: bool
) -> None:
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1) * 10 + 1  # each row of another size, none around 0
    run = compiled(_ByToken(48, 40, bias=bias, per_tensor=per_tensor), x)
    torch.testing.assert_close(run.result, run.expected, atol=1e-4, rtol=1e-4)
    assert run.count("qlinear_pointwise") == 1
    assert run.count("aten.mm") == run.count("aten.addmm") == 0
    assert any("aten.sum" in call for call in run.prepared), "sums of weights are no work of a call"


def test_a_symbolic_number_of_rows_is_served_by_one_compilation() -> None:
    model = nn.Sequential(_ByToken(48, 40), nn.ReLU(), _ByToken(40, 24))
    run = torch.compile(model, backend="kiln", dynamic=True, options={"fallback": False, "adaptive": False})
    torchkiln.reset_stats()
    with torch.no_grad():
        for rows in (4, 9, 3):
            x = torch.randn(rows, 48)
            expected, result = model(x), run(x)
            step = (expected.max() - expected.min()).item() / 255
            assert (result - expected).abs().max().item() <= 1.05 * step
    assert torchkiln.stats().graphs == 2, "one for weights, one for calls"


def _torchao(model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = copy.deepcopy(model).eval()
        quantize_(made, Int8DynamicActivationInt8WeightConfig(**options))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 96), (2, 5, 96)])
def test_torchaos_dynamic_quantization_reads_packed_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32, bias=False)).to(dtype)
    run = compiled(_torchao(model), torch.randn(shape).to(dtype))
    if dtype == torch.float32:
        run.check()
    else:
        torch.testing.assert_close(run.result, run.expected, atol=0.03, rtol=0.03)
    assert run.count("qlinear_pointwise") == 2
    assert run.count("_int_mm") == 0
    assert sum("qlinear_prepack" in call for call in run.prepared) == 2


def test_torchaos_dynamic_quantization_of_one_row_is_torchs_matmul() -> None:
    run = compiled(_torchao(nn.Sequential(nn.Linear(96, 64))), torch.randn(1, 96))
    run.check()
    assert run.count("_int_mm") == 1
    assert [record.reason for record in torchkiln.stats().matmuls][-1] == "not of packed integers: it has few rows"


class _Sums(nn.Module):
    """A matmul of bytes, whose sums are read as ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("weight", torch.randint(-128, 128, (64, 4096)).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return torch._int_mm(x, self.weight.t()).to(self.dtype)


@pytest.mark.parametrize("signed", [False, True])
def test_sums_of_products_of_bytes_are_eagers_to_the_bit(signed: bool) -> None:
    x = (
        torch.randint(-128, 128, (8, 4096)).to(torch.int8)
        if signed
        else torch.randint(0, 256, (8, 4096)).to(torch.uint8)
    )
    run = compiled(_Sums(torch.float32), x)
    assert torch.equal(run.result, run.expected)
    assert run.count("qlinear_pointwise") == 1


def test_sums_that_are_read_as_integers_stay_integers() -> None:
    run = compiled(_Sums(torch.int64), torch.randint(0, 256, (8, 4096)).to(torch.uint8))
    assert torch.equal(run.result, run.expected)
    assert run.count("_int_mm") == 1
