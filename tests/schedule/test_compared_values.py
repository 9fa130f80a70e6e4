"""What is asked to be equal is the same number wherever it is computed: gradients of extrema find them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from torchkiln.config import Settings
from torchkiln.ir import expr as ex
from torchkiln.ir.program import Loop, Program
from torchkiln.lowering import lower
from torchkiln.schedule.rounding import round_compared_values
from torchkiln.target import capture_target


def _product_read_twice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """A kernel that needs the product for something else does not round it together with the sum."""
    return (a * b + c).amax(-1) + (a * b).sin().sum(-1)


def _normalized(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    length = (a * a + b * b + 1e-3).sqrt()
    return (length / length.amax(-1, keepdim=True)) ** 0.5 * c


def _three_extrema(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = (a * b + c).tanh() * a
    return y.amax(-1) + y.amin(-1) + y.norm(float("inf"), -1)


def _checkpointed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    result: Tensor = checkpoint(_three_extrema, a, b, c, use_reentrant=False)
    return result


FUNCTIONS = [_product_read_twice, _normalized, _three_extrema, _checkpointed]


def _gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*inputs).float().sum(), inputs)


@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_extrema_are_those_of_eager(
    function: Callable[..., Tensor], dtype: torch.dtype, budget: float
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    # Of few different values, so that extrema are reached several times.
    inputs = [torch.randint(-40, 40, (16, 300)).to(dtype).div(16).requires_grad_() for _ in range(3)]
    compiled = torch.compile(function, backend="kiln", options={"fallback": False, "memory_budget": budget})
    # Halves that are off by one step at each of a few roundings.
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13}.get(dtype, 16 * torch.finfo(dtype).eps)
    for mine, eagers in zip(_gradients(compiled, inputs), _gradients(function, inputs), strict=True):
        assert mine.isfinite().all()
        error = (mine - eagers).double().norm() / eagers.double().norm()
        assert error <= tolerance


def _lowered(function: Callable[..., Tensor], *inputs: Tensor) -> Program:
    return lower(make_fx(function, tracing_mode="fake")(*inputs), Settings(), capture_target(Settings()))


def _operations(program: Program) -> set[str]:
    loops = [operation for operation in program.operations if isinstance(operation, Loop)]
    return {node.name for loop in loops for node in ex.walk((loop.value,)) if isinstance(node, ex.Op)}


def test_only_what_is_compared_is_rounded_at_each_step() -> None:
    x = torch.randn(4, 8)
    compared = round_compared_values(_lowered(lambda a, b: (a * b + a) == (a * b + a).amax(-1, keepdim=True), x, x))
    assert "rounded" in _operations(compared)
    others = (
        lambda a, b: a * b + a,
        lambda a, b: (a * b + a) == 2.0,
        lambda a, b: (a * b + a) > (a * b + a).amax(-1, keepdim=True),
        lambda a, b: (a * b).to(torch.int64) == b.to(torch.int64),
    )
    for function in others:
        program = _lowered(function, x, x)
        assert round_compared_values(program) is program
    halves = round_compared_values(_lowered(lambda a: (a * a) == (a * a).amax(-1, keepdim=True), x.bfloat16()))
    assert "narrow" not in _operations(halves)
