"""Tensor subclasses that AOTAutograd takes apart into the plain tensors they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from tests.higher_order.against_eager import compiled

Tensor = torch.Tensor


class Scaled(torch.Tensor):
    """A tensor stored as values and one factor for all of them."""

    values: Tensor
    factor: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, factor: Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=factor.dtype, device=values.device
        )

    def __init__(self, values: Tensor, factor: Tensor) -> None:
        self.values, self.factor = values, factor

    def __repr__(self, **_options: Any) -> str:  # torch's own looks at the values, which have none while tracing
        return f"Scaled({list(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "factor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _meta: Any, _size: Any, _stride: Any) -> Scaled:
        return Scaled(inner["values"], inner["factor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):  # views keep their kind
            return Scaled(func(args[0].values), args[0].factor)
        plain = pytree.tree_map_only(Scaled, lambda t: t.values.to(t.factor.dtype) * t.factor, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _pair(*size: int) -> TwoTensor:
    return TwoTensor(torch.randn(size), torch.randn(size))


def _parts(value: TwoTensor) -> tuple[Tensor, Tensor]:
    assert isinstance(value, TwoTensor)
    return value.a, value.b


@pytest.mark.parametrize("training", [False, True])
def test_a_subclass_goes_in_and_out(training: bool) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.sin() @ y).relu() + x.sum()

    x, y = _pair(3, 4).requires_grad_(training), torch.randn(4, 5).requires_grad_(training)
    result, expected = compiled(function)(x, y), function(x, y)
    torch.testing.assert_close(_parts(result), _parts(expected))
    if training:
        got = torch.autograd.grad(result.cos().sum(), (x, y))
        wanted = torch.autograd.grad(expected.cos().sum(), (x, y))
        torch.testing.assert_close([_parts(g) for g in got], [_parts(w) for w in wanted])


def test_a_subclass_as_a_parameter() -> None:
    module = torch.nn.Linear(4, 3)
    weight = Scaled(torch.randint(-8, 8, (3, 4), dtype=torch.int8), torch.tensor(0.25))
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 4)
    torch.testing.assert_close(compiled(module)(x), module(x))


def test_a_subclass_made_inside() -> None:
    def function(x: Tensor) -> Tensor:
        return TwoTensor(x, x + 1) * 2

    run = compiled(function)
    for _ in range(3):
        x = torch.randn(4)
        torch.testing.assert_close(_parts(run(x)), _parts(function(x)))
