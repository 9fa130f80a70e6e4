"""Small networks with the structure of the well-known ones, each with the inputs it is tested on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """Multi-head self-attention with an additive mask, spelled out so that its softmax is visible to the compiler."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        mixed = torch.softmax(scores, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class EncoderLayer(nn.Module):
    """Post-norm transformer encoder layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class TransformerEncoder(nn.Module):
    """Two layers over token ids, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(20, 32)
        self.layers = nn.ModuleList(EncoderLayer(32, 4) for _ in range(2))

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, keep[:, None, None, :])
        return x


class LstmLoop(nn.Module):
    """An LSTM cell unrolled over time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(12, 20)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 20)
        c = x.new_zeros(x.shape[0], 20)
        outputs = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            outputs.append(self.head(h))
        return torch.stack(outputs, 1)


class BasicBlock(nn.Module):
    """ResNet's block of two 3x3 convolutions, with a strided projection on the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.shortcut = nn.Sequential(nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class Bottleneck(nn.Module):
    """ResNet's 1x1, 3x3, 1x1 block, followed by max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(32, 8, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.expand = nn.Conv2d(8, 32, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.conv(y)))
        y = F.relu(self.norm3(self.expand(y)) + x)
        return F.max_pool2d(y, 3, stride=2, padding=1)


class ConvNextBlock(nn.Module):
    """Depthwise 7x7 convolution, layer norm over channels, an inverted bottleneck, layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm = nn.LayerNorm(16, eps=1e-6)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class Gpt2Block(nn.Module):
    """Pre-norm block with causal attention and the tanh form of gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = Attention(32, 4)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.register_buffer("causal", torch.ones(24, 24, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = x + self.attention(self.norm1(x), self.causal[:length, :length])
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class UNet(nn.Module):
    """One level down and two ways up (transposed convolution, bilinear upsampling), with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.side = nn.Conv2d(16, 8, 1)
        self.leave = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enter(x)
        low = self.down(skip)
        smooth = F.interpolate(self.side(low), scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.leave(torch.cat([self.up(low), smooth, skip], 1))


class BagClassifier(nn.Module):
    """Embedding bags of varying length, a classifier and its cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(60, 16, mode="mean")
        self.head = nn.Linear(16, 7)

    def forward(self, ids: Tensor, offsets: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.bag(ids, offsets))), target, label_smoothing=0.1)


@dataclass(frozen=True)
class Case:
    """A network and its inputs; floating inputs are float32 and get gradients."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def _padding_mask() -> Tensor:
    lengths = torch.tensor([17, 9, 4])
    return torch.arange(17) < lengths[:, None]


CASES = (
    Case("mlp", Mlp, lambda: (torch.randn(19, 33),)),
    Case("transformer_encoder", TransformerEncoder, lambda: (torch.randint(50, (3, 17)), _padding_mask())),
    Case("lstm_loop", LstmLoop, lambda: (torch.randn(3, 6, 12),)),
    Case("resnet_basic", BasicBlock, lambda: (torch.randn(4, 8, 14, 14),)),
    Case("resnet_bottleneck", Bottleneck, lambda: (torch.randn(4, 32, 9, 9),)),
    Case("convnext_block", ConvNextBlock, lambda: (torch.randn(2, 16, 12, 12),)),
    Case("gpt2_block", Gpt2Block, lambda: (torch.randn(2, 21, 32),)),
    Case("unet", UNet, lambda: (torch.randn(2, 3, 16, 16),)),
    Case(
        "embedding_bag_loss",
        BagClassifier,
        lambda: (torch.randint(60, (40,)), torch.tensor([0, 7, 8, 20, 33]), torch.tensor([1, 0, 6, 3, 3])),
    ),
)
