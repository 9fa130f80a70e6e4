"""Scaled updates: what Dynamo takes apart is one call again, with eager's order of rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.bitwise import assert_same as assert_same_bits
from tests.passes.pre_grad.captured import assert_same, capture, text
from torchkiln.canonicalize.torch_calls import normalize_calls
from torchkiln.passes.pre_grad.scaled_updates import fuse_scaled_updates

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(dtype: torch.dtype = torch.float32, length: int = 1000) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    w, a, b = (torch.rand(length, generator=generator).to(dtype) + 0.1 for _ in range(3))
    return w, a, b, torch.tensor(0.37)


def _pass(function: Callable[..., Any], *inputs: Any) -> str:
    gm = capture(function, *inputs)
    normalize_calls(gm)
    fuse_scaled_updates(gm)
    assert_same(gm, function, *inputs, rtol=1e-5, atol=1e-6)
    return "; ".join(line.partition(" = ")[2] or line for line in text(gm).splitlines())


@pytest.fixture
def taken_apart() -> None:
    """Only where this torch captures a scaled update as ``fma``, which nobody writes by hand."""
    gm = capture(lambda w, a: w.addcmul_(a, a, value=2), torch.ones(2), torch.ones(2))
    if "fma" not in text(gm):
        pytest.skip("this torch captures scaled updates whole, or as products and sums a user may have written")


@pytest.mark.parametrize("name", ["addcmul_", "addcdiv_"])
@pytest.mark.usefixtures("taken_apart")
def test_a_number_goes_back_into_the_call(name: str) -> None:
    def function(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return getattr(w, name)(a, b, value=-0.5)

    assert _pass(function, *_inputs()[:3]) == f".{name}(l_w_, l_a_, l_b_, value=-0.5); return ({name},)"


@pytest.mark.usefixtures("taken_apart")
def test_a_tensor_is_multiplied_into_the_first_operand() -> None:
    def function(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return w.addcdiv_(a, b, value=v)

    assert _pass(function, *_inputs()) == "mul(l_a_, l_v_); .addcdiv_(l_w_, mul, l_b_); return (addcdiv_,)"


@pytest.mark.usefixtures("taken_apart")
def test_updates_follow_each_other() -> None:
    def function(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        a.mul_(0.9).addcmul_(b, b, value=0.1)
        w.addcdiv_(b, a, value=-0.01)

    after = _pass(function, *_inputs()[:3])
    assert after == (
        ".mul_(l_a_, 0.9); .addcmul_(mul_, l_b_, l_b_, value=0.1); .addcdiv_(l_w_, l_b_, l_a_, value=-0.01); return ()"
    )


def _product_read_again(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> Any:
    product = torch.mul(a, b)
    return w.copy_(torch.ops.prims.fma(product, 0.5, w)), product


def _sum_read_again(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> Any:
    total = torch.ops.prims.fma(torch.mul(a, b), 0.5, w)
    return w.copy_(total), total


def _operand_written_in_between(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> Any:
    product = torch.mul(a, b)
    a.add_(1)
    return w.copy_(torch.ops.prims.fma(product, 0.5, w))


def _other_target(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> Any:
    return a.copy_(torch.ops.prims.fma(torch.mul(a, b), 0.5, w))


def _value_of_each_element(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> Any:
    return w.copy_(torch.ops.prims.fma(torch.mul(a, b), a, w))


def _wider_product(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> Any:
    return w.copy_(torch.ops.prims.fma(torch.mul(a, b.double()), 0.5, w))


@pytest.mark.usefixtures("taken_apart")
@pytest.mark.parametrize(
    "function",
    [
        _product_read_again,
        _sum_read_again,
        _operand_written_in_between,
        _other_target,
        _value_of_each_element,
        _wider_product,
    ],
)
def test_what_others_could_see_stays(function: Callable[..., Any]) -> None:
    assert "fma" in _pass(function, *_inputs())
    assert_same_bits(function, _inputs, allowed=1e-6)  # the sum is one instruction here and two in eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [4096, 37])
@pytest.mark.parametrize("name", ["addcmul_", "addcdiv_"])
@pytest.mark.usefixtures("taken_apart")
def test_compiled_updates_have_the_bits_of_eager(name: str, length: int, dtype: torch.dtype) -> None:
    def function(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return getattr(w, name)(a, b, value=-0.001)

    assert_same_bits(function, lambda: _inputs(dtype, length))


@pytest.mark.usefixtures("taken_apart")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda w, a, b, v: w.addcmul_(a, b, value=v),
        lambda w, a, b, v: w.addcdiv_(a, b, value=v),
        lambda w, a, b, v: w.add_(a, alpha=v),
    ],
    ids=["addcmul_", "addcdiv_", "add_"],
)
def test_scaled_by_a_tensor_as_eager_by_the_number(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """Eager reads the number; ``add_`` of bfloat16 rounds it to bfloat16 first, which Dynamo does not."""
    rounded = "add_" in function.__code__.co_names and dtype == torch.bfloat16
    assert_same_bits(function, lambda: _inputs(dtype), allowed=0.01 if rounded else 0.0)


def test_gradients_go_through_a_fused_update() -> None:
    def function(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (w * 1).addcdiv_(a, b, value=0.5)

    def make() -> list[torch.Tensor]:
        return [t.requires_grad_() for t in _inputs()[:3]]

    assert_same_bits(function, make, leaves=list, allowed=1e-5)
