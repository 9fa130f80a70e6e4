"""Activations and second tensors after a layer, as graphs have them, and what of them is fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchkiln.passes.freezing.onednn.calls import packed_calls
from torchkiln.recorder import Record, listen

Function = Callable[..., Tensor]


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS: dict[str, tuple[str, Function]] = {
    "relu": ("relu", F.relu),
    "clamp from 0": ("relu", lambda x: x.clamp(min=0)),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "tanh": ("tanh", torch.tanh),
    "gelu": ("gelu", F.gelu),
    "gelu by erf": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5))),
    "gelu of tanh": ("gelu", lambda x: F.gelu(x, approximate="tanh")),
    "gelu of GPT-2": ("gelu", gelu_new),
    "silu": ("swish", F.silu),
    "silu by hand": ("swish", lambda x: x * torch.sigmoid(x)),
    "hardswish": ("hardswish", F.hardswish),
    "hardswish by hand": ("hardswish", lambda x: x * F.relu6(x + 3) / 6),
    "hardswish by a share": ("hardswish", lambda x: x * (F.relu6(x + 3) / 6)),
    "hardsigmoid": ("hardsigmoid", F.hardsigmoid),
    "hardsigmoid by hand": ("hardsigmoid", lambda x: F.relu6(x + 3) / 6),
    "leaky relu": ("leaky_relu", lambda x: F.leaky_relu(x, 0.2)),
    "relu6": ("hardtanh", F.relu6),
    "hardtanh": ("hardtanh", lambda x: F.hardtanh(x, -0.3, 0.7)),
    "clamp": ("hardtanh", lambda x: x.clamp(-0.5, 1)),
}
BINARY: dict[str, Function] = {
    "add": lambda y, other: y + other,
    "add to it": lambda y, other: other + y,
    "sub": lambda y, other: y - other,
    "mul": lambda y, other: y * other,
}


class Then(nn.Module):
    """A layer and a function of its result."""

    def __init__(self, layer: nn.Module, function: Function) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.function(self.layer(x), *more)


@pytest.fixture
def fused() -> Iterator[list[tuple[str, ...]]]:
    """What is fused into each call of oneDNN compiled meanwhile."""
    found: list[tuple[str, ...]] = []

    def keep(record: Record) -> None:
        if record.stage == "inference graph":
            found.extend(call.fused for call in packed_calls(record.value.graph))

    with listen(keep):
        yield found


def moved_into_bias(name: str, dtype: torch.dtype) -> bool:
    """Whether the addition that an activation begins with is made part of the bias before it is looked for."""
    return name == "hardsigmoid by hand" or (name == "hardsigmoid" and dtype == torch.float32)


