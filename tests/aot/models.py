"""Small models that packages are made of in these tests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).softmax(-1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


class Attention(nn.Module):
    """A block over a batch and a sequence of any length, with a mask that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).reshape(batch, length, width))


class Counter(nn.Module):
    """Writes to its buffers and to an argument."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor, log: Tensor) -> Tensor:
        self.count.add_(1)
        self.total = self.total + x.sum(0)
        log[0] = x.max()
        return self.total / self.count


class Nested(nn.Module):
    """Takes and returns containers, constants and a part of its argument."""

    def forward(self, batch: dict[str, Any], *states: Tensor, scale: float = 2.0, name: str = "sum") -> Any:
        x = batch["x"] * scale
        first, (second, third) = batch["pair"]
        whole = x.sum() if name == "sum" else x.mean()
        return OrderedDict(
            {"sum": whole, "parts": [first + states[0], (second * 2, third)], "rows": x.shape[0], "none": None, "k": 3}
        )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.out.weight = self.embedding.weight
        self.scale = torch.full((4,), 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embedding(tokens) * self.scale)
