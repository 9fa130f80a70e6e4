"""Jagged nested tensors: a graph is given their values and offsets, and the name of the ragged dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("everything_compiled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def _nested(*lengths: int, requires_grad: bool = False) -> torch.Tensor:
    rows = [torch.randn(length, 8) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor) and expected.is_nested:
        assert found.is_nested
        torch.testing.assert_close(found.offsets(), expected.offsets())
        found, expected = found.values(), expected.values()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.layer_norm(x, (8,)).sin() * 2,
        lambda x: (x * 2).to_padded_tensor(0.0) + 1,
        lambda x: x.offsets() + x.values().sum().long(),
        lambda x: x.unflatten(-1, [2, 4]).sin().flatten(-2),
    ],
    ids=["pointwise and norm", "padded", "parts", "views"],
)
def test_a_nested_tensor_is_computed_with_as_in_eager(
    compile_strictly: Callable[..., Any], fn: Callable[..., Any]
) -> None:
    compiled = compile_strictly(fn)
    with torch.no_grad():
        for lengths in ((3, 5), (6, 2)):  # other lengths are other values of one symbol
            x = _nested(*lengths)
            _assert_same(compiled(x), fn(x))


def test_nested_tensors_train(compile_strictly: Callable[..., Any]) -> None:
    layer = nn.Linear(8, 8)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(layer(x), (8,)).sin()

    compiled = compile_strictly(fn)
    for lengths in ((3, 5), (2, 7), (4, 4)):
        x = _nested(*lengths, requires_grad=True)
        results = []
        for run in (fn, compiled):
            layer.zero_grad()
            x.grad = None
            y = run(x)
            y.values().pow(2).sum().backward()
            results.append([y.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()])
        for expected, found in zip(*results, strict=True):
            _assert_same(found, expected)


def test_a_nested_tensor_is_made_and_returned(compile_strictly: Callable[..., Any]) -> None:
    def fn(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values * 2, offsets).sin()

    values, offsets = torch.randn(8, 4), torch.tensor([0, 3, 8])
    _assert_same(compile_strictly(fn)(values, offsets), fn(values, offsets))


def test_the_ragged_size_itself_is_handed_through(compile_strictly: Callable[..., Any]) -> None:
    def fn(x: torch.Tensor) -> Any:
        return x.size(1), x.sin()

    x = _nested(3, 5)
    size, y = compile_strictly(fn)(x)
    assert size == x.size(1)
    _assert_same(y, fn(x)[1])
