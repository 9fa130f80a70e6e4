"""Elementwise operators against eager: every dtype, awkward values, shapes and layouts, and type promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.against_eager import DTYPES, FLOATS, INTEGERS, SHAPES, check, layouts, specimen

aten = torch.ops.aten
Function = Callable[..., Any]


def _calls(names: str) -> dict[str, Function]:
    return {name: getattr(torch, name) for name in names.split()}


# Results are the same bits as eager's.
EXACT_UNARY: dict[str, Function] = {
    **_calls("neg abs sign floor ceil trunc round bitwise_not logical_not isnan isinf signbit relu clone square"),
    "isfinite": torch.isfinite,
    "x+1": lambda x: x + 1,
    "2-x": lambda x: 2 - x,
    "x*2.5": lambda x: x * 2.5,
    "x/4": lambda x: x / 4,
    "x//3": lambda x: x // 3,
    "x//-3": lambda x: torch.div(x, -3, rounding_mode="floor"),
    "trunc x/3": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "x%3": lambda x: x % 3,
    "x%-3": lambda x: torch.remainder(x, -3),
    "fmod 3": lambda x: torch.fmod(x, 3),
    "x>1": lambda x: x > 1,
    "x!=0": lambda x: x != 0,
    "x<=0.5": lambda x: x <= 0.5,
    "x==1": lambda x: x == 1,
    "x&6": lambda x: x & 6,
    "x|1": lambda x: x | 1,
    "x^3": lambda x: x ^ 3,
    "x**2": lambda x: x**2,
    "x**0": lambda x: x**0,
    "clamp": lambda x: x.clamp(-1, 3),
    "clamp to zero": lambda x: x.clamp(0, 0),
    "clamp_min": lambda x: x.clamp(min=1),
    "clamp_max": lambda x: x.clamp(max=1),
    "where scalar": lambda x: torch.where(x > 0, x, 7),
    "where two scalars": lambda x: torch.where(x > 0, 1, 0),
    "where float": lambda x: torch.where(x > 0, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 1, 3),
    "hardtanh": lambda x: F.hardtanh(x),
    "threshold_backward": lambda x: aten.threshold_backward(x, x, 1),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.25),
}

# Math functions: a few units in the last place.
CLOSE_UNARY: dict[str, Function] = {
    **_calls("exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh"),
    **_calls("erf erfc lgamma digamma sigmoid rsqrt reciprocal"),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sqrt": torch.sqrt,
    "x**3": lambda x: x**3,
    "x**0.5": lambda x: x**0.5,
    "x**-1": lambda x: x**-1,
    "x**-2": lambda x: x**-2,
    "x**2.5": lambda x: x**2.5,
    "2.5**x": lambda x: torch.pow(2.5, x),
}

EXACT_BINARY: dict[str, Function] = {
    **_calls("add sub mul div copysign eq ne lt le gt ge"),
    **_calls("logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"),
    "add alpha": lambda x, y: torch.add(x, y, alpha=2),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "rsub": lambda x, y: torch.rsub(x, y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill tensor": lambda x, y: x.masked_fill(y > 0, torch.tensor(1)),
    "mask": lambda x, y: (x < y).to(x.dtype) * x,
}

# Which zero is the larger of 0.0 and -0.0 is left open, in eager too: its vector and scalar code differ.
EXTREMA: dict[str, Function] = {
    **_calls("maximum minimum fmax fmin"),
    "clamp tensor": lambda x, y: x.clamp(min=y),
    "clamp two tensors": lambda x, y: torch.clamp(x, y, x),
}

FLOAT_BINARY: dict[str, Function] = {
    **_calls("atan2 hypot remainder fmod pow floor_divide"),
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=2),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp far": lambda x, y: torch.lerp(x, y, 0.75),
}

GRADIENTS: dict[str, Function] = {
    "gelu_backward": lambda g, x: aten.gelu_backward(g, x),
    "gelu_backward tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "silu_backward": lambda g, x: aten.silu_backward(g, x),
    "sigmoid_backward": lambda g, x: aten.sigmoid_backward(g, x),
    "tanh_backward": lambda g, x: aten.tanh_backward(g, x),
    "native_dropout_backward": lambda g, x: aten.native_dropout_backward(g, x > 0, 2.0),
}


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


# Integer division by a number is generated; these are not, and say so: division by a tensor may meet a zero, which
# eager answers with an exception, and the others have no operation of their own.
_MAY_CALL = ("aten.pow.Tensor_Scalar", "aten.pow.Scalar", "aten.abs.default", "aten.relu.default")


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(4, 7), (2, 130)], ids=name_of)
def test_unary_operators_give_the_bits_of_eager(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    extern: tuple[str, ...] = tuple(_MAY_CALL) if dtype == torch.bool else ()
    if dtype == torch.uint8:  # numbers below zero do not fit: what then happens is the operator's to say
        extern = ("aten.clamp.default", "aten.div.Tensor_mode", "aten.remainder.Scalar")
    check(EXACT_UNARY, [specimen(dtype, shape)], exact=True, extern=extern)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_math_functions_are_close_to_eager(dtype: torch.dtype) -> None:
    check(CLOSE_UNARY, [specimen(dtype, (2, 130))], slack=2)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=name_of)
def test_every_shape_works(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    some = {name: EXACT_UNARY[name] for name in ("x+1", "x>1", "clone", "where scalar", "x/4", "isnan")}
    two = {name: (lambda x, f=EXACT_BINARY[name]: f(x, x.flip(()))) for name in ("add", "mul", "eq", "where")}
    check({**some, **two}, [specimen(dtype, shape)], exact=True)


_LAID_OUT = [
    (shape, layout)
    for shape in ((5,), (4, 7), (2, 3, 33), (2, 130))
    for layout in layouts(specimen(torch.float32, shape))
]


@pytest.mark.parametrize(("shape", "layout"), _LAID_OUT, ids=str)
def test_every_layout_of_inputs_works(shape: tuple[int, ...], layout: str) -> None:
    x, y = specimen(torch.float32, shape), specimen(torch.float32, shape, seed=1)
    functions = {name: EXACT_BINARY[name] for name in ("add", "sub", "where", "eq")}
    check(functions, [layouts(x)[layout], y], exact=True)
    check(functions, [x, layouts(y)[layout]], exact=True)
    check(functions, [layouts(x)[layout], layouts(y)[layout]], exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_binary_operators_give_the_bits_of_eager(dtype: torch.dtype) -> None:
    # Two roundings of one half-precision result are one too many; a multiply and an add may become one instruction.
    fused = ("add alpha", "sub alpha") if dtype.is_floating_point else ()
    functions = {name: f for name, f in EXACT_BINARY.items() if name not in fused}
    inputs = [specimen(dtype, (2, 3, 33)), specimen(dtype, (2, 3, 33), seed=1)]
    check(functions, inputs, exact=True, extern=("aten.add.Tensor",) if dtype == torch.bool else ())
    if fused:
        check({name: EXACT_BINARY[name] for name in fused}, inputs)
    extern = ("aten.fmax.default", "aten.fmin.default", "aten.clamp.Tensor") if dtype == torch.bool else ()
    check(EXTREMA, inputs, extern=extern)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_float_binary_functions_are_close_to_eager(dtype: torch.dtype) -> None:
    inputs = [specimen(dtype, (2, 130), tame=True), specimen(dtype, (2, 130), seed=1, tame=True)]
    check(FLOAT_BINARY, inputs, slack=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("name", ["remainder", "fmod", "floor_divide", "div trunc", "pow", "atan2", "hypot"])
def test_float_binary_functions_meet_awkward_values(name: str, dtype: torch.dtype) -> None:
    awkward = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -3.5, float("inf"), float("-inf"), float("nan")], dtype=dtype)
    x, y = torch.meshgrid(awkward, awkward, indexing="ij")
    check({name: FLOAT_BINARY[name]}, [x.contiguous(), y.contiguous()])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_gradients_of_activations_are_close_to_eager(dtype: torch.dtype) -> None:
    inputs = [specimen(dtype, (3, 50), tame=True), specimen(dtype, (3, 50), seed=1, tame=True)]
    check(GRADIENTS, inputs, slack=4)


@pytest.mark.parametrize("other", DTYPES, ids=name_of)
def test_types_promote_as_in_eager(other: torch.dtype) -> None:
    """Tensors of two dtypes, with and without dimensions, and Python numbers."""
    functions: dict[str, Function] = {}
    for name in ("add", "mul", "div", "eq", "lt", "where"):
        functions[name] = EXACT_BINARY[name]
        functions[f"{name} 0-dim"] = lambda x, y, f=EXACT_BINARY[name]: f(x, y.select(0, 0).select(0, 0))
        functions[f"0-dim {name}"] = lambda x, y, f=EXACT_BINARY[name]: f(x.select(0, 0).select(0, 0), y)
    functions |= {
        "int": lambda x, y: (x + 1) * y,
        "float": lambda x, y: x * 1.5 + y,
        "bool": lambda x, y: x + True,
        "where number": lambda x, y: torch.where(x > 0, y, 2.5),
        "stack": lambda x, y: torch.cat([x, y]),
    }
    for first in (torch.float32, torch.float16, torch.int32, torch.uint8, torch.bool):
        inputs = [specimen(first, (3, 5), tame=True), specimen(other, (3, 5), seed=1, tame=True)]
        check(functions, inputs, slack=2)


@pytest.mark.parametrize("source", DTYPES, ids=name_of)
def test_conversions_give_the_bits_of_eager(source: torch.dtype) -> None:
    # A float out of the range of an integer has no defined value, in eager neither.
    x = specimen(source, (3, 47))
    if source.is_floating_point:
        into_integers = specimen(source, (3, 47), tame=True).abs() * 20
        check({name_of(t): (lambda x, t=t: x.to(t)) for t in INTEGERS}, [into_integers], exact=True)
        check({name_of(t): (lambda x, t=t: (-x).to(t)) for t in INTEGERS[:4]}, [into_integers], exact=True)
        check({name_of(t): (lambda x, t=t: x.to(t)) for t in (*FLOATS, torch.bool)}, [x], exact=True)
    else:
        check({name_of(t): (lambda x, t=t: x.to(t)) for t in DTYPES}, [x], exact=True)


def test_chains_in_half_precision_round_as_eager_when_asked_to() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x * y + x) * 1.1 - y) * x

    for dtype in (torch.bfloat16, torch.float16):
        inputs = [specimen(dtype, (9, 33), tame=True), specimen(dtype, (9, 33), seed=1, tame=True)]
        check({"chain": chain}, inputs, exact=True, precision="eager")


def test_chains_in_half_precision_are_closer_to_float64_than_eager_by_default() -> None:
    from tests.lowering.against_eager import compiled

    def chain(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(10):
            x = x * 1.01 + 0.01
        return (x,)

    x = specimen(torch.bfloat16, (64, 16), tame=True)
    exact = chain(x.double())[0]
    (got,) = compiled(chain, [x])(x)
    assert (got.double() - exact).abs().mean() < (chain(x)[0].double() - exact).abs().mean() / 2


def test_copying_into_a_tensor_converts_and_broadcasts() -> None:
    copy = {
        "copy": lambda x, y: aten.copy(x, y),
        "row": lambda x, y: aten.copy(x, y[0]),
        "one": lambda x, y: aten.copy(y, x[0, 0]),
    }
    for left, right in ((torch.float32, torch.int64), (torch.bfloat16, torch.float64), (torch.bool, torch.float32)):
        check(copy, [specimen(left, (4, 5), tame=True), specimen(right, (4, 5), 1, tame=True)], exact=True)


def test_broadcasting_follows_eager() -> None:
    functions = {name: EXACT_BINARY[name] for name in ("add", "mul", "where", "eq")}
    for left, right in (((4, 1), (1, 7)), ((), (3, 4)), ((5,), (2, 1, 1)), ((1,), (0, 3)), ((1, 1, 40), (6, 1, 1))):
        check(functions, [specimen(torch.float32, left), specimen(torch.float32, right, seed=2)], exact=True)


def test_integer_division_by_zero_is_eagers_error() -> None:
    from tests.lowering.against_eager import compiled

    x, y = torch.arange(4), torch.tensor([1, 2, 0, 1])
    run = compiled(lambda x, y: (torch.div(x, y, rounding_mode="floor"),), [x, y])
    # Before 2.13 torch gives its text to nobody but stderr.
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError|writes its message to stderr"):
        run(x, y)
    assert torch.equal(run(x, y + 1)[0], x // (y + 1))
