"""Small models of four families, to train for one step: what is saved, what is recomputed, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear layers with GELU, layer norm and dropout."""

    def __init__(self, width: int = 64, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)]
            layers += [nn.LayerNorm(width)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Transformer(nn.Module):
    """Blocks with layer norm before attention and before the linear layers."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(depth))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ResidualConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ConvNet(nn.Module):
    """Convolutions with batch norm in training mode and residual connections."""

    def __init__(self, channels: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualConvBlock(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Rotary position embedding, RMS norm and SwiGLU."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(depth))
        self.norm = RmsNorm(width)
        self.register_buffer("frequencies", 1e4 ** -torch.linspace(0, 1, width // heads // 2))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


@dataclass(frozen=True)
class Case:
    """``make`` gives a model in training mode, ``inputs`` what it is called with; both from the current seed."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


CASES = (
    Case("mlp", Mlp, lambda: (torch.randn(32, 64),)),
    Case("transformer", Transformer, lambda: (torch.randint(50, (2, 16)),)),
    Case("convnet", ConvNet, lambda: (torch.randn(2, 3, 12, 12),)),
    Case("llama", Llama, lambda: (torch.randn(2, 16, 32),)),
)

LARGE_CASES = (
    Case("mlp", lambda: Mlp(256, 6), lambda: (torch.randn(512, 256),)),
    Case("transformer", lambda: Transformer(128), lambda: (torch.randint(50, (8, 64)),)),
    Case("convnet", lambda: ConvNet(32), lambda: (torch.randn(8, 3, 32, 32),)),
    Case("llama", lambda: Llama(128), lambda: (torch.randn(8, 64, 128),)),
)
"""The same, with tensors of the sizes whose memory matters."""
