"""Quantized linears as int8 calls: activations, residuals, leading dimensions, dynamic scales and symbolic batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.quantized.pt2e import compiled, quantized


def _mlp(function: nn.Module, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64, bias=bias), function, nn.Linear(64, 16, bias=bias))


@pytest.mark.parametrize("shape", [(8, 32), (2, 5, 32), (2, 3, 4, 32)])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nn.ReLU, "relu"),
        (nn.ReLU6, "hardtanh"),
        (nn.GELU, "gelu"),
        (lambda: nn.GELU("tanh"), "gelu"),
        (nn.Tanh, "tanh"),
        (nn.LeakyReLU, "leaky_relu"),
        (nn.SiLU, "swish"),
        (nn.Hardswish, "hardswish"),
    ],
)
def test_an_activation_and_the_quantize_after_it_become_part_of_the_linear(
    function: Callable[[], nn.Module], name: str, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    run = compiled(quantized(_mlp(function()), x), x)
    run.check()
    assert run.count("qlinear_pointwise") == 2
    assert any(call.startswith("onednn.qlinear") and f"torch.uint8, '{name}'" in call for call in run.calls)
    assert run.count("aten.mm") == run.count("aten.addmm") == run.count(f"aten.{name}") == 0


def test_a_linear_without_bias_and_an_activation_it_does_not_know_are_served() -> None:
    x = torch.randn(6, 32)
    run = compiled(quantized(_mlp(nn.Softplus(), bias=False), x), x)
    run.check()
    assert run.count("qlinear_pointwise") == 2


class _Residual(nn.Module):
    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(32, 32), nn.Linear(32, 32), function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.second(self.function(self.first(x) + y))
        return result


@pytest.mark.parametrize("shape", [(8, 32), (2, 5, 32)])
@pytest.mark.parametrize("function", [nn.ReLU, nn.Identity])
def test_a_residual_that_is_quantized_again_becomes_part_of_the_linear(
    function: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    x, y = torch.randn(shape), torch.randn(shape)
    run = compiled(quantized(_Residual(function()), x, y), x, y)
    run.check()
    assert run.count("qlinear_pointwise.binary") == 1
    assert run.count("qlinear_pointwise") == 2


@pytest.mark.parametrize("shape", [(8, 32), (2, 5, 32)])
def test_dynamic_quantization_chooses_scales_in_loops_and_multiplies_integers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    converted = quantized(_mlp(nn.ReLU()), x, dynamic=True)
    run = compiled(converted, x * 3)  # not what it was calibrated on
    run.check()
    assert run.count("qlinear_pointwise.tensor") == 2
    assert run.count("quantized_decomposed") == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_symbolic_batch_is_served_by_one_compilation(dynamic: bool) -> None:
    x = torch.randn(4, 5, 32)
    batch = torch.export.Dim("batch", min=2, max=64)
    converted = quantized(_mlp(nn.GELU()), x, dynamic=dynamic, dynamic_shapes=({0: batch},))
    run = torch.compile(converted, backend="kiln", dynamic=True, options={"fallback": False, "adaptive": False})
    torchkiln.reset_stats()
    with torch.no_grad():
        for size in (4, 9, 3):
            x = torch.randn(size, 5, 32)
            expected, result = converted(x), run(x)
            step = (expected.max() - expected.min()).item() / 255
            assert (result - expected).abs().max().item() <= 1.05 * step
    assert torchkiln.stats().graphs == 2, "one for weights, one for calls"
    assert not torchkiln.stats().per_size


def test_an_autocast_model_multiplies_integers_and_gives_bfloat16() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.relu, self.linear = nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Linear(8, 8)
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(torch.relu(self.linear(self.relu(self.convolution(x)).mean((2, 3)))))
            return result

    x = torch.randn(3, 4, 10, 10)
    converted = quantized(Model(), x)
    run = compiled(converted, x, autocast=True)
    assert run.result.dtype == torch.bfloat16
    run.check(steps=2, mean=0.5)  # a step of bfloat16 is a step of 255 here
    assert run.count("qconv") == 1
    assert run.count("qlinear") == 2
    assert run.count("aten.convolution") == run.count("aten.addmm") == 0
