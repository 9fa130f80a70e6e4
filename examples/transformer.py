"""A small transformer: one call for inference and some steps of training, compiled with torchkiln.

kiln explain examples/transformer.py --html report.html
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project(x).chunk(3, -1)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.merge(found.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.contract(F.gelu(self.expand(self.before_mlp(x))))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, tokens: int = 256, width: int = 128, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.predict = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.predict(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(width=options.width, layers=options.layers)
    text = torch.randint(0, 256, (4, 65))
    tokens, following = text[:, :-1], text[:, 1:]
    compiled = torch.compile(model, backend="kiln")

    with torch.no_grad():
        for _ in range(options.steps):
            compiled(tokens)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
    print(f"loss after {options.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
