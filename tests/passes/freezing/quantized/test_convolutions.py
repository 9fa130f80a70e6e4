"""Quantized convolutions as int8 calls: activations, residuals, requantizing, geometry and symbolic batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.quantized.pt2e import SUMS_IN_PLACE, compiled, quantized


class _Chain(nn.Module):
    """Two convolutions with a function in between, and one after them."""

    def __init__(self, between: nn.Module, **options: int) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(8, 16, 3, padding=1, **options), between
        self.second = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.between(self.first(x)))
        return result


class _Residual(nn.Module):
    def __init__(self, channels: int, *, last_function: bool = True) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.third = nn.Conv2d(channels, channels, 1)
        self.relu, self.last = nn.ReLU(), nn.ReLU() if last_function else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.third(self.last(self.second(self.relu(self.first(x))) + x))
        return result


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (nn.ReLU, "relu"),
        (nn.ReLU6, "hardtanh"),
        (lambda: nn.Hardtanh(-0.5, 0.5), "hardtanh"),
        (nn.Hardswish, "hardswish"),
        (nn.SiLU, "swish"),
    ],
)
def test_an_activation_and_the_quantize_after_it_become_part_of_the_convolution(
    function: Callable[[], nn.Module], name: str
) -> None:
    x = torch.randn(2, 8, 14, 14)
    run = compiled(quantized(_Chain(function()), x), x)
    run.check()
    assert run.count("qconv") == 2
    assert any(call.startswith("onednn.qconv") and f"torch.uint8, '{name}'" in call for call in run.calls)
    assert run.count("aten.convolution") == run.count("aten.relu") == 0


@pytest.mark.parametrize("function", [nn.GELU, nn.Sigmoid, nn.Tanh])
def test_an_activation_that_the_int8_convolution_does_not_know_is_a_loop(function: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 8, 14, 14)
    run = compiled(quantized(_Chain(function()), x), x)
    run.check()
    assert run.count("qconv") == 2


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"groups": 8}, {"groups": 2}])
def test_strides_dilation_and_groups_are_those_of_the_convolution(options: dict[str, int]) -> None:
    x = torch.randn(2, 8, 15, 13)
    run = compiled(quantized(_Chain(nn.ReLU(), **options), x), x)
    run.check()
    assert run.count("qconv") == 2


def test_a_convolution_without_bias_and_channels_last_images_are_served() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False))
    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    run = compiled(quantized(model, x), x)
    run.check()
    assert run.count("qconv") == 2


@pytest.mark.parametrize("last_function", [True, False])
def test_a_residual_of_integers_is_summed_in_place_by_the_convolution(last_function: bool) -> None:
    x = torch.randn(2, 8, 14, 14)
    run = compiled(quantized(_Residual(8, last_function=last_function), x), x)
    run.check()
    assert run.count("qconv2d_pointwise.binary") == SUMS_IN_PLACE
    # The image is laid out once and summed into, as it is not read later; the result is laid out as eager's.
    assert run.count("aten.clone") == 2


def test_a_residual_that_is_read_later_is_not_overwritten() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = _Residual(8), _Residual(8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.a(x) - self.b(x)
            return result

    x = torch.randn(2, 8, 10, 10)
    run = compiled(quantized(Twice(), x), x)
    run.check(steps=2)


def test_a_symbolic_batch_is_served_by_one_compilation() -> None:
    model = _Residual(8)
    x = torch.randn(4, 8, 14, 14)
    batch = torch.export.Dim("batch", min=2, max=64)
    converted = quantized(model, x, dynamic_shapes=({0: batch},))
    run = torch.compile(converted, backend="kiln", dynamic=True, options={"fallback": False, "adaptive": False})
    torchkiln.reset_stats()
    with torch.no_grad():
        for size in (4, 7, 2):
            x = torch.randn(size, 8, 14, 14)
            expected, result = converted(x), run(x)
            step = (expected.max() - expected.min()).item() / 255
            assert (result - expected).abs().max().item() <= 1.05 * step
    assert torchkiln.stats().graphs == 2, "one for weights, one for calls"
    assert not torchkiln.stats().per_size


def test_the_weight_is_packed_where_weights_change_and_not_at_each_call() -> None:
    x = torch.randn(2, 8, 14, 14)
    run = compiled(quantized(_Chain(nn.ReLU()), x), x)
    assert run.count("prepack") == 0
    assert sum("qconv_prepack" in call for call in run.prepared) == 2
