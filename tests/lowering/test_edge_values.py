"""Values at the edges against eager: NaN, infinities, zeros of both signs, numbers that do not fit, refused inputs.

Tensors are long enough that eager takes its vector code for every element: its code for what is left over at the end
of a tensor answers NaN differently here and there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.against_eager import FLOATS, INTEGERS, check

aten = torch.ops.aten
Compile = Callable[..., Any]


def _edges(dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 0.3, 3.0, -3.0, 6.0, 2.5, 1e-3, -100.0]
    numbers += [limits.max, -limits.max, limits.tiny, -limits.tiny, limits.tiny / 4, 127.6, -129.0, 255.9, 256.0, 100.0]
    numbers += [7.0, -7.0, 10.0, -2.0, 2.0, 1e4]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype).repeat(8)


GRADIENTS = {
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0),
    "relu6": lambda g, x: aten.hardtanh_backward(g, x, 0.0, 6.0),
    "elu": lambda g, x: aten.elu_backward(g, 1.0, 1.0, 1.0, False, x),
    "selu": lambda g, x: aten.elu_backward(g, 1.6732632423543772, 1.0507009873554805, 1.0, False, x),
    "elu of its result": lambda g, x: aten.elu_backward(g, 0.5, 1.0, 2.0, True, x),
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "logit": lambda g, x: aten.logit_backward(g, x, 1e-3),
    "relu": lambda g, x: aten.threshold_backward(g, x, 0),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_activations_at_the_edges(dtype: torch.dtype) -> None:
    x = _edges(dtype)
    slopes = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).to(dtype)
    check(GRADIENTS, [slopes, x], slack=4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_functions_with_bounds_at_the_edges(dtype: torch.dtype) -> None:
    functions = {
        "logit": lambda x: torch.logit(x, eps=1e-3),
        "clamp": lambda x: x.clamp(1e-3, 0.999),
        "frac": torch.frac,
        "softshrink": F.softshrink,
        "hardshrink": F.hardshrink,
    }
    check(functions, [_edges(dtype)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bounds_and_quotients_are_rounded_to_the_half_type_first(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 0.9995, 3.0, 6.0, -3.0, 0.0] * 16).to(dtype)
    functions = {
        "clamp": lambda x: x.clamp(max=0.9997),
        "truncated quotient": lambda x: torch.div(x, torch.full_like(x, 0.3), rounding_mode="trunc"),
    }
    check(functions, [x], exact=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exponent", [0.5, -0.5])
def test_roots_as_powers_of_zeros_and_infinities(dtype: torch.dtype, exponent: float) -> None:
    check({"pow": lambda x: x**exponent}, [torch.tensor([0.0, -0.0, math.inf, -math.inf, 4.0] * 16, dtype=dtype)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_floored_quotient_that_overflows_is_infinite(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([2.0, -2.0, 0.0, math.inf, 3.0, math.nan] * 16, dtype=dtype)
    y = torch.tensor([tiny / 4, tiny / 4, tiny / 4, 2.0, 0.0, 1.0] * 16, dtype=dtype)
    check({"floor": torch.floor_divide}, [x, y], exact=True)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", INTEGERS, ids=str)
def test_conversions_of_numbers_that_do_not_fit(source: torch.dtype, target: torch.dtype) -> None:
    numbers = [3e9, -3e9, 1e10, 1e19, math.nan, math.inf, -math.inf, -1.5, 70000.0, -70000.0, 5e9 + 7, 300.0]
    x = torch.tensor(numbers, dtype=torch.float64).to(source).repeat(16)
    check({"to": lambda x: x.to(target)}, [x], exact=True)


REFUSED = {
    "frac of integers": (torch.frac, torch.tensor([1, 2])),
    "round of bool": (torch.round, torch.tensor([True])),
    "floor of bool": (torch.floor, torch.tensor([True])),
    "relu of bool": (F.relu, torch.tensor([True])),
    "std of integers": (torch.std, torch.tensor([1, 2])),
    "cross entropy of no probability": (
        lambda x: F.binary_cross_entropy(x, torch.ones_like(x)),
        torch.tensor([0.5, 1.5]),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_is_refused_with_its_error(compile_strictly: Compile, name: str) -> None:
    function, x = REFUSED[name]
    with pytest.raises(Exception) as expected:  # noqa: PT011
        function(x)
    with pytest.raises(type(expected.value)) as found:
        compile_strictly(function)(x)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
