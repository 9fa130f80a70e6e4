"""Twenty small graphs of the kinds that programs have, for processes that compile them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Graph:
    """A function with its inputs, which are the same in every process; ``train`` compares gradients too."""

    function: Callable[..., Any]
    inputs: Inputs
    train: bool = False
    dynamic: bool = False

    def compare(self, compiled: Callable[..., Any]) -> None:
        """Raise where ``compiled`` gives other results or gradients than the function itself."""
        found, expected = self._results(compiled), self._results(self.function)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def _results(self, function: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        given = self.inputs()
        results = function(*given)
        tensors = list(results) if isinstance(results, tuple) else [results]
        if not self.train:
            return tensors
        weights = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        wanted = [*(tensor for tensor in given if tensor.requires_grad), *weights]
        grads = torch.autograd.grad(sum(tensor.square().sum() for tensor in tensors), wanted)
        return [*tensors, *grads]


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, leaf: bool = False) -> Inputs:
    return lambda: tuple(torch.randn(shape, dtype=dtype).requires_grad_(leaf) for shape in shapes)


def _module(module: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Graph:
    """A module in training, as a function of its inputs: weights are the same in every process."""
    torch.manual_seed(1)
    return Graph(module(), _normal(*shapes, leaf=True), train=True)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 3, -1) @ v


def _counted(x: Tensor, times: Tensor) -> Tensor:
    times.add_(1)
    return x.cos() * times


def graphs() -> dict[str, Graph]:
    leafs = _normal((6, 12), (12, 8), leaf=True)
    return {
        "pointwise": Graph(lambda x: x.sin() * 2 + x.exp(), _normal((9, 33))),
        "softmax": Graph(lambda x: x.softmax(-1).sum(0), _normal((9, 33))),
        "layer norm": Graph(lambda x: F.layer_norm(x, (33,)), _normal((9, 33))),
        "attention": Graph(_attention, _normal((2, 7, 8), (2, 5, 8), (2, 5, 8))),
        "bfloat16": Graph(lambda x: (x.float().exp().sum(-1), x * 2), _normal((9, 32), dtype=torch.bfloat16)),
        "sort": Graph(lambda x: x.sort(-1).values, _normal((4, 50))),
        "cumulative sum": Graph(lambda x: x.cumsum(1) + 1, _normal((4, 50))),
        "gather": Graph(lambda x, y: x[(y.abs() * 3).long().clamp(max=8)], _normal((9, 20), (17,))),
        "concatenation": Graph(lambda x, y: torch.cat((x.tanh(), y), 1).t().contiguous(), _normal((5, 7), (5, 9))),
        "write to an input": Graph(_counted, lambda: (torch.randn(11), torch.zeros(()))),
        "pointwise, training": Graph(lambda x: F.gelu(x) * x, _normal((9, 33), leaf=True), train=True),
        "matmul, training": Graph(lambda x, w: (x @ w).relu(), leafs, train=True),
        "attention, training": Graph(_attention, _normal((2, 7, 8), (2, 5, 8), (2, 5, 8), leaf=True), train=True),
        "two results, training": Graph(lambda x, w: (x.mean(0), w.exp()), leafs, train=True),
        "MLP": _module(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (5, 8)),
        "convolutions": _module(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), (2, 3, 9, 9)),
        "encoder": _module(lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), (2, 5, 16)),
        "pointwise, dynamic": Graph(lambda x: x.sin() * x.shape[0], _normal((9, 33)), dynamic=True),
        "reduction, dynamic": Graph(lambda x: x.var(1) + x.amax(1), _normal((9, 33)), dynamic=True),
        "matmul, training, dynamic": Graph(lambda x, w: (x @ w).tanh(), leafs, train=True, dynamic=True),
    }
