"""Layers between quantize and dequantize calls with any scales, zero points, ranges and dtypes, without a quantizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from torch import Tensor, nn

_ops = torch.ops.quantized_decomposed
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Scheme:
    """How an activation is stored: a number is ``scale * (stored - zero_point)``."""

    scale: float = 0.03
    zero_point: int = 128
    dtype: torch.dtype = torch.uint8
    low: int | None = None
    high: int | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        limits = torch.iinfo(self.dtype)
        low, high = limits.min if self.low is None else self.low, limits.max if self.high is None else self.high
        return self.scale, self.zero_point, low, high, self.dtype

    def quantize(self, x: Tensor) -> Tensor:
        result: Tensor = _ops.quantize_per_tensor(x, *self.arguments)
        return result

    def dequantize(self, stored: Tensor) -> Tensor:
        result: Tensor = _ops.dequantize_per_tensor(stored, *self.arguments)
        return result

    def through(self, x: Tensor) -> Tensor:
        return self.dequantize(self.quantize(x))


SIGNED = Scheme(0.03, 3, torch.int8)
ASYMMETRIC = Scheme(0.02, 17)


class Int8Weight(nn.Module):
    """A weight of int8, with a scale for each result or ``per_tensor`` one."""

    def __init__(self, shape: tuple[int, ...], *, per_tensor: bool = False) -> None:
        super().__init__()
        self.per_tensor = per_tensor
        self.register_buffer("stored", torch.randint(-128, 128, shape).to(torch.int8))
        self.register_buffer("scales", torch.rand(shape[0]) * 0.002 + 0.001)
        self.register_buffer("zero_points", torch.zeros(shape[0], dtype=torch.int64))

    def forward(self) -> Tensor:
        result: Tensor
        if self.per_tensor:
            result = _ops.dequantize_per_tensor(self.stored, 0.0015, 0, -128, 127, torch.int8)
        else:
            given = self.stored, self.scales, self.zero_points, 0, -128, 127, torch.int8
            result = _ops.dequantize_per_channel(*given)
        return result


class Convolution(nn.Module):
    def __init__(
        self,
        dimensions: int,
        inner: int,
        outer: int,
        side: int,
        *,
        groups: int = 1,
        per_tensor: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__()
        self.dimensions, self.options = dimensions, {"groups": groups, **rest}
        self.weight = Int8Weight((outer, inner // groups, *(side,) * dimensions), per_tensor=per_tensor)
        self.bias = nn.Parameter(torch.randn(outer))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _CONVOLUTIONS[self.dimensions](x, self.weight(), self.bias, **self.options)
        return result


class Linear(nn.Module):
    def __init__(self, inner: int, outer: int, *, bias: bool = True, per_tensor: bool = False) -> None:
        super().__init__()
        self.weight = Int8Weight((outer, inner), per_tensor=per_tensor)
        self.bias = nn.Parameter(torch.randn(outer)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


class Chain(nn.Module):
    """Layers, with each input of them quantized by ``scheme``, and functions between them."""

    def __init__(self, scheme: Scheme, *layers: nn.Module, last: Scheme | None = None) -> None:
        super().__init__()
        self.scheme, self.layers, self.last = scheme, nn.ModuleList(layers), last

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.scheme.through(x)) if isinstance(layer, (Convolution, Linear)) else layer(x)
        return x if self.last is None else self.last.quantize(x)
