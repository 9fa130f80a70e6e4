"""What only moves elements, or picks the largest, reads integers; quantizing again what was dequantized falls away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.passes.freezing.quantized.pt2e import Compiled, compiled, quantized


class _Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int = 8) -> None:
        super().__init__()
        self.first, self.relu, self.function = nn.Conv2d(4, 8, 3), nn.ReLU(), function
        self.second = nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.function(self.relu(self.first(x))))
        return result


def _check_all_in_integers(run: Compiled) -> None:
    run.check()
    assert run.count("qconv") == 2
    assert any(call.startswith("onednn.qconv") and "torch.uint8, 'relu'" in call for call in run.calls)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (2, 3), "stride": (1, 2)},
        {"kernel_size": 2, "dilation": 2},
    ],
)
def test_max_pooling_reads_integers(options: dict[str, int]) -> None:
    x = torch.randn(2, 4, 17, 14)
    run = compiled(quantized(_Between(nn.MaxPool2d(**options)), x), x)
    _check_all_in_integers(run)
    assert run.count("max_pool") == 0
    assert run.count("aten.maximum") > 0


def test_max_pooling_that_rounds_sizes_up_stays_in_numbers() -> None:
    x = torch.randn(2, 4, 17, 14)
    run = compiled(quantized(_Between(nn.MaxPool2d(2, ceil_mode=True)), x), x)
    run.check()
    assert run.count("max_pool") == 1


@pytest.mark.parametrize("pad", [nn.ZeroPad2d((0, 1, 2, 1)), nn.ConstantPad2d(1, 0.7), nn.ConstantPad2d(2, 1e9)])
def test_what_is_padded_and_quantized_is_quantized_first(pad: nn.Module) -> None:
    x = torch.randn(2, 4, 17, 14)
    run = compiled(quantized(_Between(pad), x), x)
    _check_all_in_integers(run)
    (padded,) = [call for call in run.calls if call.startswith("aten.constant_pad_nd")]
    assert "qconv" in padded, "the padding reads what the int8 call stored"


def test_a_crop_is_quantized_after_it() -> None:
    x = torch.randn(2, 4, 17, 14)
    run = compiled(quantized(_Between(nn.ZeroPad2d((-3, 0, 0, -4))), x), x)
    run.check()
    assert run.count("qconv") == 2


def test_a_padding_that_is_read_twice_stays_in_numbers() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(x, (1, 1))
            return padded + padded.amax(-1, keepdim=True)

    x = torch.randn(2, 4, 17, 14)
    compiled(quantized(_Between(Twice()), x), x).check()


def test_average_pooling_is_between_int8_calls() -> None:
    x = torch.randn(2, 4, 18, 14)
    run = compiled(quantized(_Between(nn.AvgPool2d(2)), x), x)
    run.check()
    assert run.count("qconv") == 2


def test_concatenation_reads_integers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv2d(16, 4, 1)
            self.relu, self.other = nn.ReLU(), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.c(torch.cat([self.relu(self.a(x)), self.other(self.b(x))], 1))
            return result

    x = torch.randn(2, 4, 12, 12)
    run = compiled(quantized(Model(), x), x)
    run.check()
    assert run.count("qconv") == 3
    assert run.count("aten.mul") == 1, "numbers are quantized at the beginning and nowhere else"


def test_flattened_images_go_from_a_convolution_to_a_linear_as_integers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.relu, self.linear = nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Linear(8 * 36, 10)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(torch.flatten(self.relu(self.convolution(x)), 1))
            return result

    x = torch.randn(2, 4, 8, 8)
    run = compiled(quantized(Model(), x), x)
    run.check()
    assert run.count("qconv") == run.count("qlinear") == 1
    assert run.count("aten.mul") == 1


def test_a_permutation_between_linears_moves_integers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.second = nn.Linear(16, 16), nn.ReLU(), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.relu(self.first(x)).transpose(1, 2))
            return result

    x = torch.randn(3, 6, 16)
    run = compiled(quantized(Model(), x), x)
    run.check()
    assert run.count("qlinear") == 2
    assert run.count("aten.mul") == 1


def test_what_two_readers_dequantize_is_returned_as_eager_has_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.relu, self.second = nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.relu(self.first(x))
            result: Tensor = self.second(y) + y.transpose(2, 3)
            return result

    x = torch.randn(2, 4, 6, 6)
    run = compiled(quantized(Model(), x), x)
    run.check()
    assert run.count("qconv") == 2
