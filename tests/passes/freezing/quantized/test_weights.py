"""Weights of quantized models: changed ones are never used stale, and what the int8 calls cannot do is eager's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from tests.passes.freezing.quantized.pt2e import STRICT_EXPORT, compiled, quantized

ops = torch.ops.quantized_decomposed


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.relu, self.linear = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.relu(self.convolution(x)).permute(0, 2, 3, 1))
        return result


@pytest.mark.parametrize("kind", ["_frozen_param", "_scale_", "bias"])
def test_a_changed_weight_scale_or_bias_is_used_at_the_next_call(kind: str) -> None:
    x = torch.randn(2, 4, 9, 9)
    converted = quantized(_Net(), x)
    run = torch.compile(converted, backend="kiln", options={"fallback": False, "adaptive": False})
    named = {**dict(converted.named_buffers()), **dict(converted.named_parameters())}
    chosen = [value for name, value in named.items() if kind in name]
    assert len(chosen) == 2
    with torch.no_grad():
        before = run(x)
        for value in chosen:
            value.copy_(value.flip(0) if kind != "bias" else value + 1)
        expected, after = converted(x), run(x)
    step = (expected.max() - expected.min()).item() / 255
    assert (after - expected).abs().max().item() <= 1.05 * step
    assert (after - before).abs().max().item() > 3 * step


class _Asymmetric(nn.Module):
    """A quantized linear whose weight has zero points."""

    def __init__(self, zero_points: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-100, 100, (6, 16)).to(torch.int8))
        self.register_buffer("scales", torch.rand(6) * 0.01 + 0.01)
        self.register_buffer("zero_points", zero_points)

    def forward(self, x: Tensor) -> Tensor:
        x = ops.quantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
        x = ops.dequantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
        weight = ops.dequantize_per_channel(self.weight, self.scales, self.zero_points, 0, -128, 127, torch.int8)
        return nn.functional.linear(x, weight)


def test_weights_with_zero_points_give_eagers_answer() -> None:
    model = _Asymmetric(torch.randint(1, 20, (6,)))
    run = compiled(model, torch.randn(5, 16))
    torch.testing.assert_close(run.result, run.expected)


def test_zero_points_that_appear_later_are_not_ignored() -> None:
    model, x = _Asymmetric(torch.zeros(6, dtype=torch.int64)), torch.randn(5, 16)
    run = torch.compile(model, backend="kiln", options={"fallback": False, "adaptive": False})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), atol=1e-5, rtol=1e-5)
        model.zero_points[2] = 9
        torch.testing.assert_close(run(x), model(x), atol=1e-5, rtol=1e-5)
        model.zero_points[2] = 0
        torch.testing.assert_close(run(x), model(x), atol=1e-5, rtol=1e-5)


def test_a_process_that_loads_compiled_code_checks_zero_points_too() -> None:
    program = """
import torch
from torchkiln.artifact.calls import OperatorCall, TensorArgument
from torchkiln.errors import NotPreparedError
from torchkiln.runtime.executable import _operator_function

check = _operator_function(OperatorCall("kiln::require_zero", "", (TensorArgument(0),), 1, 0))
assert check([torch.zeros(3, dtype=torch.int64)], []).tolist() == [0, 0, 0]
try:
    check([torch.tensor([0, 1])], [])
except NotPreparedError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_one_scale_for_a_whole_weight_is_served() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-100, 100, (6, 16)).to(torch.int8))
            self.register_buffer("kernel", torch.randint(-100, 100, (6, 1, 3, 3)).to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            x = ops.quantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
            x = ops.dequantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
            weight = ops.dequantize_per_tensor(self.weight, 0.02, 0, -128, 127, torch.int8)
            kernel = ops.dequantize_per_tensor(self.kernel, 0.02, 0, -128, 127, torch.int8)
            return nn.functional.conv2d(x[:, None, None], kernel, padding=(1, 0)).mean((2, 3)) + nn.functional.linear(
                x, weight
            )

    run = compiled(Model(), torch.randn(7, 16))
    torch.testing.assert_close(run.result, run.expected, atol=1e-3, rtol=1e-4)
    assert run.count("qlinear") == run.count("qconv") == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_with_a_column_for_each_result_is_transposed_where_it_is_packed(transposed: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-100, 100, (16, 6)).to(torch.int8))
            self.register_buffer("scales", torch.rand(16 if transposed else 6) * 0.01 + 0.01)

        def forward(self, x: Tensor) -> Tensor:
            x = ops.quantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
            x = ops.dequantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
            axis = 0 if transposed else 1
            return x @ ops.dequantize_per_channel(self.weight, self.scales, None, axis, -128, 127, torch.int8)

    run = compiled(Model(), torch.randn(7, 16))
    torch.testing.assert_close(run.result, run.expected, atol=1e-4, rtol=1e-4)
    assert run.count("qlinear") == (0 if transposed else 1), "scales along the contraction are no int8 matmul"


# The quantizer itself refuses the padding as a strict export writes it.
_CIRCULAR = () if STRICT_EXPORT else (nn.Conv2d(4, 4, 3, padding_mode="circular"),)


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(4, 4, 2), *_CIRCULAR])
def test_a_quantized_model_with_a_layer_that_no_pass_knows_gives_eagers_answer(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), layer, nn.Conv2d(4, 4, 1))
    x = torch.randn(2, 4, 9, 9)
    compiled(quantized(model, x), x).check()


def test_the_settings_that_ask_for_eagers_numbers_have_no_int8_calls() -> None:
    x = torch.randn(2, 4, 9, 9)
    converted = quantized(_Net(), x)
    run = torch.compile(
        converted, backend="kiln", options={"fallback": False, "adaptive": False, "prepare_weights": False}
    )
    with torch.no_grad():
        torch.testing.assert_close(run(x), converted(x), atol=1e-5, rtol=1e-4)
