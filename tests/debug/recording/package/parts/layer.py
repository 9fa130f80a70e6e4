"""A layer: a module that holds another one."""

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)  # mean
        return x * torch.rsqrt(mean + 1e-6) * self.weight  # scaled


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Scale(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.scale(x))  # linear
        for _ in range(2):
            y = torch.tanh(y) + 0.5  # repeated
        return x + y  # residual
