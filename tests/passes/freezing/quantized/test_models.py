"""A residual network and an encoder, quantized and compiled, against the quantized models in eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.freezing.quantized.pt2e import SUMS_IN_PLACE, compiled, quantized


class _Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer))
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            if stride != 1
            else nn.Identity()
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.second(self.first(x)) + self.shortcut(x))
        return result


class _ResNet(nn.Module):
    """ResNet-18 with a quarter of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = [16, 16, 32, 64, 128]
        blocks: list[nn.Module] = []
        for stage in range(4):
            blocks.append(_Block(widths[stage], widths[stage + 1], 1 if stage == 0 else 2))
            blocks.append(_Block(widths[stage + 1], widths[stage + 1], 1))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        result: Tensor = self.head(torch.flatten(x, 1))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        result: Tensor = self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return result


class _Bert(nn.Module):
    """Two layers of an encoder as BERT has them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(100, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    _Attention(width, 4),
                    nn.LayerNorm(width),
                    nn.Linear(width, 4 * width),
                    nn.GELU(),
                    nn.Linear(4 * width, width),
                    nn.LayerNorm(width),
                ]
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        for attention, norm, wide, gelu, narrow, last in self.layers:  # type: ignore[misc]
            x = norm(attention(x) + x)
            x = last(narrow(gelu(wide(x))) + x)
        result: Tensor = self.head(x[:, 0])
        return result


def _relative_error(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("autocast", [False, True])
def test_a_residual_network_multiplies_integers_from_the_first_convolution_to_the_head(autocast: bool) -> None:
    x = torch.randn(2, 3, 64, 64)
    model = _ResNet()
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.randn(4, 3, 64, 64))  # statistics for the norms
    run = compiled(quantized(model, x), x, autocast=autocast)
    assert _relative_error(run.result, run.expected) < (0.03 if autocast else 0.01)
    assert run.count("qconv") == 20
    assert run.count("qlinear") == 1
    assert run.count("binary") == 8 * SUMS_IN_PLACE, "every residual"
    assert run.count("aten.convolution") == run.count("max_pool") == run.count("addmm") == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_encoder_multiplies_integers_in_every_linear(dynamic: bool) -> None:
    ids = torch.randint(0, 100, (2, 12))
    run = compiled(quantized(_Bert(), ids, dynamic=dynamic), ids)
    assert _relative_error(run.result, run.expected) < 0.01
    assert run.count("qlinear") == 13
    assert dynamic or sum("torch.uint8, 'gelu'" in call for call in run.calls) == 2


def test_an_encoder_under_autocast_multiplies_integers_in_every_linear() -> None:
    ids = torch.randint(0, 100, (2, 12))
    run = compiled(quantized(_Bert(), ids), ids, autocast=True)
    assert _relative_error(run.result.float(), run.expected.float()) < 0.05
    assert run.count("qlinear") == 13
