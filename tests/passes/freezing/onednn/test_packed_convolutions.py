"""Convolutions with packed weights: which are packed, what they give, and what changed weights do to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchkiln
from tests.passes.freezing.onednn.comparison import DTYPES, agree, calls_since, compare, compiled, packed_calls
from torchkiln.native.onednn import packed_dtypes

pytestmark = pytest.mark.skipif("float32" not in packed_dtypes(), reason="needs oneDNN")

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2d": (lambda: nn.Conv2d(6, 8, 3, padding=1), (6, 9, 7)),
    "2d with a stride": (lambda: nn.Conv2d(6, 8, (3, 2), stride=(2, 1), padding=(1, 0)), (6, 9, 7)),
    "2d with dilation": (lambda: nn.Conv2d(6, 8, 3, dilation=2, bias=False), (6, 9, 7)),
    "2d with groups": (lambda: nn.Conv2d(6, 9, 3, groups=3), (6, 9, 7)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16, padding=1), (16, 9, 7)),
    "1 x 1": (lambda: nn.Conv2d(6, 8, 1), (6, 9, 7)),
    "one channel": (lambda: nn.Conv2d(1, 8, 3), (1, 9, 7)),
    "one pixel": (lambda: nn.Conv2d(6, 8, 1), (6, 1, 1)),
    "padding as asked for": (lambda: nn.Conv2d(6, 8, 4, padding="same"), (6, 9, 7)),
    "1d": (lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1), (6, 20)),
    "1d with groups": (lambda: nn.Conv1d(6, 8, 3, groups=2), (6, 20)),
    "3d": (lambda: nn.Conv3d(6, 8, 3, stride=(1, 2, 1), padding=1), (6, 5, 6, 7)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, 8, 3, stride=2), (6, 20)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1, output_padding=1), (6, 9, 7)),
    "transposed with groups": (lambda: nn.ConvTranspose2d(6, 8, 4, stride=2, groups=2, dilation=2), (6, 9, 7)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_packed_convolution_gives_what_eager_gives(name: str, dtype: torch.dtype) -> None:
    make, shape = CONVOLUTIONS[name]
    module, before = make().eval().to(dtype), torchkiln.stats()
    agree(module, torch.randn(2, *shape).to(dtype))
    assert packed_calls(before) == 1


@pytest.mark.parametrize("name", ["2d", "1d", "3d", "transposed 2d"])
def test_one_compilation_serves_batches_of_all_sizes(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    module, before = make().eval(), torchkiln.stats()
    run = agree(module, torch.randn(3, *shape), dynamic=True)
    for batch in (2, 7):
        compare(run, module, torch.randn(batch, *shape))
    assert packed_calls(before) == 1
    assert torchkiln.stats().graphs - before.graphs == 2  # the graph, and that of its weights


def test_images_with_channels_last_stay_so() -> None:
    module = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    agree(module, torch.randn(2, 6, 12, 12).to(memory_format=torch.channels_last))


def test_a_weight_of_two_convolutions_is_packed_once() -> None:
    convolution = nn.Conv2d(6, 6, 3, padding=1)
    before = torchkiln.stats()
    agree(nn.Sequential(convolution, nn.Tanh(), convolution).eval(), torch.randn(2, 6, 9, 9))
    assert calls_since(before)["mkldnn._reorder_convolution_weight.default"] == 1


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(6, 8, 3).double(),
        nn.ConvTranspose3d(6, 8, 3),
        nn.ConvTranspose2d(6, 8, 3, stride=2, dilation=3, output_padding=2),
    ],
    ids=["float64", "a transposed convolution of volumes", "more padding than a stride"],
)
def test_what_the_library_does_not_pack_is_left_alone(module: nn.Module) -> None:
    before = torchkiln.stats()
    shape = (2, 6, 7, 7, 7) if isinstance(module, nn.ConvTranspose3d) else (2, 6, 7, 7)
    x, run = torch.randn(shape, dtype=next(module.parameters()).dtype), compiled(module.eval())
    with torch.no_grad():
        torch.testing.assert_close(run(x), module(x), rtol=1e-4, atol=1e-5)
    assert packed_calls(before) == 0


def test_no_weights_are_packed_where_the_user_has_the_library_off() -> None:
    before = torchkiln.stats()
    with torch.backends.mkldnn.flags(enabled=False):
        agree(nn.Conv2d(6, 8, 3).eval(), torch.randn(2, 6, 9, 9))
    assert packed_calls(before) == 0


def test_a_weight_that_is_computed_at_each_call_is_not_packed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6, 3, 3))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.conv2d(x, self.weight * scale)

    before = torchkiln.stats()
    agree(Scaled(), torch.randn(2, 6, 9, 9), torch.rand(1))
    assert packed_calls(before) == 0


def test_a_changed_weight_is_packed_again() -> None:
    module, x = nn.Conv2d(6, 8, 3).eval(), torch.randn(2, 6, 9, 9)
    run = agree(module, x)
    with torch.no_grad():
        module.weight.mul_(2)
    compare(run, module, x)
    module.weight.data = torch.randn(8, 6, 3, 3)
    compare(run, module, x)
    module.load_state_dict(nn.Conv2d(6, 8, 3).state_dict())
    compare(run, module, x)


def test_passes_that_check_themselves_accept_packed_weights() -> None:
    module = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    agree(module, torch.randn(2, 6, 12, 12), checks=True, check_numerics=True)


def test_training_packs_nothing() -> None:
    module, before = nn.Conv2d(6, 8, 3), torchkiln.stats()
    compiled(module)(torch.randn(2, 6, 9, 9)).sum().backward()
    assert packed_calls(before) == 0
