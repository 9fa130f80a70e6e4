"""Quantize, dequantize and the choice of scales as arithmetic in loops, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.freezing.quantized import pt2e
from torchkiln.recorder import Record, listen

assert pt2e  # torch's operators are defined by its imports
ops = torch.ops.quantized_decomposed


def _check(function: Callable[..., Any], *inputs: Tensor) -> None:
    """The same bits as eager, without a call of torch's operators."""
    called: list[str] = []

    def note(record: Record) -> None:
        if record.stage == "inference graph":
            called.extend(str(node.target) for node in record.value.graph.nodes)

    with torch.no_grad(), listen(note):
        expected = function(*inputs)
        run = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False, "adaptive": False})
        result = run(*inputs)
    assert called
    assert not any("quantized_decomposed" in name for name in called)
    for mine, eager in zip(
        *(value if isinstance(value, tuple) else (value,) for value in (result, expected)), strict=True
    ):
        assert mine.dtype == eager.dtype
        assert mine.stride() == eager.stride()
        assert torch.equal(mine, eager)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("low", "high", "kind"), [(0, 255, torch.uint8), (-128, 127, torch.int8), (0, 127, torch.uint8)]
)
def test_quantize_per_tensor_rounds_and_clamps_as_eager_does(
    dtype: torch.dtype, low: int, high: int, kind: torch.dtype
) -> None:
    x = torch.cat([torch.randn(1000) * 4, torch.arange(-300, 300) * 0.05, torch.tensor([1e9, -1e9, 0.0, -0.0])])
    _check(lambda x: ops.quantize_per_tensor(x, 0.05, 3, low, high, kind), x.to(dtype))


@pytest.mark.parametrize("out", [None, torch.bfloat16, torch.float16])
def test_dequantize_per_tensor_gives_eagers_bits(out: torch.dtype | None) -> None:
    q = torch.arange(256).to(torch.uint8).view(8, 32).t()
    _check(lambda q: ops.dequantize_per_tensor(q, 0.037, 114, 0, 255, torch.uint8, out_dtype=out), q)


def test_scales_that_are_tensors_count_as_numbers() -> None:
    x, scale, zero_point = torch.randn(64, 8) * 3, torch.tensor([0.0371], dtype=torch.float64), torch.tensor([113])

    def both(x: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        q = ops.quantize_per_tensor.tensor(x, scale, zero_point, 0, 255, torch.uint8)
        return q, ops.dequantize_per_tensor.tensor(q, scale, zero_point, 0, 255, torch.uint8)

    _check(both, x, scale, zero_point)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_quantization_per_channel_gives_eagers_bits(axis: int) -> None:
    x = torch.randn(5, 5, 5)
    scales, zero_points = torch.rand(5) * 0.02 + 0.01, torch.randint(-20, 20, (5,))

    def both(x: Tensor, scales: Tensor, zero_points: Tensor) -> tuple[Tensor, Tensor]:
        q = ops.quantize_per_channel(x, scales, zero_points, axis, -128, 127, torch.int8)
        return q, ops.dequantize_per_channel(q, scales, zero_points, axis, -128, 127, torch.int8)

    _check(both, x, scales, zero_points)


@pytest.mark.parametrize("name", ["choose_qparams", "choose_qparams_symmetric"])
@pytest.mark.parametrize(("low", "high", "kind"), [(0, 255, torch.uint8), (-128, 127, torch.int8)])
@pytest.mark.parametrize("shift", [0.0, 3.0, -20.0])
def test_chosen_scales_are_eagers(name: str, low: int, high: int, kind: torch.dtype, shift: float) -> None:
    x = torch.randn(40, 30) + shift
    choose = getattr(ops, name).tensor
    _check(lambda x: tuple(choose(x, low, high, 1.1920929e-07, kind)), x)


def test_quantization_per_token_gives_eagers_bits() -> None:
    x = torch.randn(6, 32)
    scales, zero_points = torch.rand(6, 1) * 0.02 + 0.01, torch.randint(-20, 20, (6, 1))

    def both(x: Tensor, scales: Tensor, zero_points: Tensor) -> tuple[Tensor, Tensor]:
        q = ops.quantize_per_token(x, scales, zero_points, -128, 127, torch.int8)
        return q, ops.dequantize_per_token(q, scales, zero_points, -128, 127, torch.int8, torch.float32)

    _check(both, x, scales, zero_points)
