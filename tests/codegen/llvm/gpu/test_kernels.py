"""Kernels scheduled for a GPU give eager's values, run by threads of this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.llvm.gpu.on_threads import HOPPER, kernels_of, module_of, plan_for, run_on_threads
from tests.lowering.against_eager import DTYPES, FLOATS, difference, specimen
from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.operations import Instructions, Value, apply
from torchkiln.errors import UnsupportedError
from torchkiln.ir import ops
from torchkiln.native.jit import assembly_of
from torchkiln.schedule import gpu
from torchkiln.schedule.kernel import GpuMapping

Function = Callable[..., Any]


def check(
    functions: Mapping[str, Function], inputs: Sequence[torch.Tensor], *, slack: float = 1, extern: Sequence[str] = ()
) -> None:
    """Compile all ``functions`` that eager takes as one graph; the yardstick is eager, or eager in float64."""
    expected: dict[str, list[torch.Tensor]] = {}
    for name, function in functions.items():
        try:
            expected[name] = _flat(function(*inputs))
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            continue
    assert expected, "eager refused every function"

    def together(*given: torch.Tensor) -> list[torch.Tensor]:
        return [result for name in expected for result in _flat(functions[name](*given))]

    results = iter(run_on_threads(together, inputs, extern))
    complaints = []
    for name, wanted in expected.items():
        exact = _flat(functions[name](*(x.double() if x.dtype.is_floating_point else x for x in inputs)))
        for value, precise in zip(wanted, exact, strict=True):
            got = next(results)
            complaint = difference(got, value, slack=slack)
            if complaint and difference(got.contiguous(), precise.to(value.dtype).contiguous(), slack=slack):
                complaints.append(f"{name}: {complaint}")
    assert not complaints, "\n".join(complaints)


def _flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


_POINTWISE: dict[str, Function] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y * 2,
    "where": lambda x, y: torch.where(x > y, x, y),
    "bool": lambda x, y: (x > 0) | (y != 0),
    "to int64": lambda x, y: (x > y).long() + 1,
    "to float": lambda x, y: x.float() - y.float(),
    "to bfloat16": lambda x, y: (x.float() + y.float()).bfloat16(),
    "to half": lambda x, y: x.half(),
    "to uint8": lambda x, y: (x != y).to(torch.uint8),
    "neg": lambda x, y: -x,
    "max": lambda x, y: torch.maximum(x, y),
    "clamp": lambda x, y: x.clamp(0, 1),
    "remainder": lambda x, y: x.remainder(3),
    "atanh": lambda x, y: x.atanh(),
}
_MATH: dict[str, Function] = {
    "exp": torch.exp,
    "log": torch.log,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "silu": F.silu,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "round": torch.round,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 130), (2, 3, 33)], ids=str)
def test_pointwise_operators(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    extern = ["aten.remainder.Scalar", "aten.atanh.default"]  # what is not written for cards yet
    check(_POINTWISE, [specimen(dtype, shape, 1), specimen(dtype, shape, 2)], extern=extern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_math_functions(dtype: torch.dtype) -> None:
    check(_MATH, [specimen(dtype, (3, 260))])
    check({"gelu": F.gelu}, [specimen(dtype, (3, 260), tame=True)], slack=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_functions_that_cpus_take_from_a_library(dtype: torch.dtype) -> None:
    functions: dict[str, Function] = {
        "fmod": torch.fmod,
        "remainder": torch.remainder,
        "floor_divide": lambda x, y: torch.div(x, y, rounding_mode="floor"),
        "hypot": torch.hypot,
        "atanh": lambda x, y: torch.atanh(x),
        "atanh of less than 1": lambda x, y: torch.atanh(x.float() / (x.float().abs() + 1)),
    }
    check(functions, [specimen(dtype, (60, 64), 1), specimen(dtype, (60, 64), 2)])


def test_rests_of_divisions_are_exact_however_far_apart_numbers_are() -> None:
    powers = torch.arange(-149, 128, 9).double()
    x, y = (torch.pow(2.0, powers) * 1.7).float(), (torch.pow(2.0, powers) * 1.3).float()
    x, y = (side.contiguous() for side in torch.broadcast_tensors(x[:, None], -y[None]))
    wanted = [math.fmod(a, b) for a, b in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True)]
    (got,) = run_on_threads(torch.fmod, [x, y])
    assert got.flatten().tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_operands_in_any_layout(dtype: torch.dtype) -> None:
    x, y = specimen(dtype, (34, 66), tame=True), specimen(dtype, (66, 34), 3, tame=True)
    layouts: dict[str, Function] = {
        "transposed": lambda x, y: x + y.t(),
        "reversed": lambda x, y: x.flip(1) * 2,
        "every second": lambda x, y: x[:, ::2] + 1,
        "rows of a wider one": lambda x, y: x[:, 3:20] - 1,
        "broadcast": lambda x, y: x + y[:, :1].t(),
        "cat": lambda x, y: torch.cat([x, y.t()], 1),
        "pad": lambda x, y: F.pad(x, (1, 2)),
        "roll": lambda x, y: x.roll(5, 1),
    }
    check(layouts, [x, y])


_CROSSING: dict[str, Function] = {
    "copied": lambda x, y: x.t().contiguous(),
    "added": lambda x, y: x + y.t(),
    "stored both ways": lambda x, y: (x + 1, (x + 1).t().contiguous(), y),
    "padded": lambda x, y: F.pad(y.t(), (3, 2, 1, 4)) + F.pad(x, (3, 2, 1, 4)),
    "part of it": lambda x, y: x[3:, 2:] + y.t()[3:, 2:],
    "concatenated": lambda x, y: torch.cat([x, y.t()], 1),
    "halves": lambda x, y: (x.t()[::2] * 2).contiguous(),
}


@pytest.mark.parametrize("shape", [(64, 128), (33, 70), (16, 300), (130, 129)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool], ids=str)
def test_transposed_operands(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check(_CROSSING, [specimen(dtype, shape, 1), specimen(dtype, (shape[1], shape[0]), 2)])


_LAYOUTS: dict[str, Function] = {
    "plain": lambda x, y: x * 2 + y.t(),
    "reversed": lambda x, y: x.flip(1) + 1,
    "every second": lambda x, y: x[:, ::2] * 2,
    "from the fourth": lambda x, y: x[:, 3:] + y.t()[:, 3:],
    "by row": lambda x, y: x + x[:, :1],
    "padded": lambda x, y: F.pad(x, (1, 2, 3, 4)),
    "in place": lambda x, y: x.clone().add_(x),
    "sum of columns": lambda x, y: x.amax(0),
    "sum of one column": lambda x, y: x[:, None].amax(1) + y[None].amax(0).t(),
    "softmax of one": lambda x, y: x[:, :, None].float().softmax(2) + x.flip(1)[:, :, None],
    "softmax of columns": lambda x, y: x.float().softmax(0),
    "sum of short lanes": lambda x, y: x.unflatten(1, (-1, 5)).amax((0, 2)),
}


@pytest.mark.parametrize("shape", [(70, 40), (33, 35), (9, 1005)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64], ids=str)
def test_mappings_of_kernels_that_fill_a_card(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a card that few threads fill: long accesses, several items to a thread, no threads that share columns."""
    monkeypatch.setattr(gpu, "_BUSY", 16)
    x, y = specimen(dtype, shape, 1), specimen(dtype, (shape[1], shape[0]), 2)
    kernels = kernels_of(plan_for(lambda x, y: tuple(f(x, y) for f in _LAYOUTS.values()), [x, y])).values()
    mappings = [kernel.mapping for kernel in kernels if isinstance(kernel.mapping, GpuMapping)]
    assert any(mapping.lanes > 1 or mapping.items > 1 for mapping in mappings)
    check(_LAYOUTS, [x, y], slack=8)


def test_operands_in_several_orders() -> None:
    x, y = specimen(torch.float32, (2, 40, 6, 7), 1), specimen(torch.float16, (2, 6, 7, 40), 2)
    functions: dict[str, Function] = {
        "channels last": lambda x, y: x + y.permute(0, 3, 1, 2),
        "to channels last": lambda x, y: x.contiguous(memory_format=torch.channels_last) * 2,
        "heads": lambda x, y: x.transpose(1, 2).contiguous() + 1,
        "reversed": lambda x, y: x.permute(3, 2, 1, 0).contiguous(),
        "four operands": lambda x, y: x + y.permute(0, 3, 1, 2) * x.flip(0) - y.float().sin().permute(0, 3, 1, 2),
    }
    check(functions, [x, y], slack=4)  # of sums that cancel


_REDUCTIONS: dict[str, Function] = {
    "sum": lambda x: x.sum(-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x < 1).all(-1),
}


@pytest.mark.parametrize(
    ("dtype", "length"),
    [*((torch.float32, n) for n in (0, 1, 2, 31, 64, 100, 1024)), *((d, n) for d in DTYPES for n in (5, 333, 1500))],
    ids=str,
)
def test_reductions_of_rows(dtype: torch.dtype, length: int) -> None:
    check(_REDUCTIONS, [specimen(dtype, (3, length), length)], slack=8)


@pytest.mark.parametrize("length", [6000, 40000])
def test_reductions_of_rows_that_no_registers_hold(length: int) -> None:
    check(_REDUCTIONS, [specimen(torch.float32, (2, length), length, tame=True)], slack=8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_over_other_dimensions(dtype: torch.dtype) -> None:
    x = specimen(dtype, (5, 6, 40), tame=True)
    functions: dict[str, Function] = {
        "rows": lambda x: x.sum(0),
        "mean": lambda x: x.mean(1),
        "middle": lambda x: x.amax(1),
        "all": lambda x: x.sum(),
        "two": lambda x: x.sum((0, 2)),
        "transposed": lambda x: x.transpose(0, 2).sum(-1),
        "argmax": lambda x: x.argmax(0),
    }
    check(functions, [x], slack=8)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((d, (67, 40)) for d in DTYPES), *((torch.float32, s) for s in ((3, 40), (300, 33), (64, 256), (1000, 1)))],
    ids=str,
)
def test_columns_that_threads_of_a_block_share(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    functions = {name: partial(_along_columns, reduce) for name, reduce in _REDUCTIONS.items()}
    check({"sum": functions.pop("sum")}, [specimen(dtype, shape, 4, tame=True)], slack=8)
    check(functions, [specimen(dtype, shape, 4)])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, (9, 3, 20)) for dtype in DTYPES),
        *((torch.float32, shape) for shape in ((64, 4, 49), (300, 2, 7), (5, 3, 1100), (40, 1, 64))),
    ],
    ids=str,
)  # fmt: skip
def test_short_lanes_of_several_columns(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    functions: dict[str, Function] = {
        "amax": lambda x: x.amax((0, 2)),
        "amin": lambda x: x.amin((0, 2)),
        "any": lambda x: (x > 1).sum((0, 2)) > 0,
        "argmax": lambda x: x.transpose(0, 1).flatten(1).argmax(1),
    }
    check(functions, [specimen(dtype, shape, 4)])
    moments: dict[str, Function] = {
        "sum": lambda x: x.sum((0, 2)),
        "moments": lambda x: (x.float().mean((0, 2)), x.float().std((0, 2))),
        "norm": lambda x: x.float() - x.float().mean((0, 2), keepdim=True),
    }
    check(moments, [specimen(dtype, shape, 5, tame=True)], slack=8)


def _along_columns(reduce: Function, x: torch.Tensor) -> Any:
    return reduce(x.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(40, 72), (130, 33), (9, 5, 64)], ids=str)
def test_columns_of_several_phases(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    functions: dict[str, Function] = {
        "softmax": lambda x: torch.softmax(x, 0),
        "norm": lambda x: (x - x.float().mean(0)) * torch.rsqrt(x.float().var(0) + 1e-5),
        "moments of all but the last": lambda x: (x.float().flatten(0, -2).mean(0), x.float().flatten(0, -2).std(0)),
        "extremes": lambda x: (x.amax(0), x.amin(0), x.argmax(0), x / x.abs().amax(0)),
    }
    check(functions, [specimen(dtype, shape, 5, tame=True)], slack=16)


def test_columns_exchange_more_than_shared_memory_holds_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_BUSY", 512)
    x = torch.randint(0, 200, (67, 256), dtype=torch.uint8)
    functions: dict[str, Function] = {"argmax": lambda x: (x.long() * 3).argmax(0)}
    (kernel,) = kernels_of(plan_for(functions["argmax"], [x])).values()
    assert isinstance(kernel.mapping, GpuMapping)
    assert (kernel.mapping.lanes, kernel.mapping.threads) == (8, 512)
    check(functions, [x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [7, 64, 96, 768, 1000, 2048])
def test_rows_of_several_phases(dtype: torch.dtype, length: int) -> None:
    x = specimen(dtype, (5, length), length, tame=True)
    weight, bias = specimen(dtype, (length,), 1, tame=True), specimen(dtype, (length,), 2, tame=True)
    functions: dict[str, Function] = {
        "softmax": lambda x, w, b: torch.softmax(x, -1),
        "log_softmax": lambda x, w, b: torch.log_softmax(x, -1),
        "layer_norm": lambda x, w, b: F.layer_norm(x, (length,), w, b),
        "rms_norm": lambda x, w, b: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w,
        "norm of a sum, and the sum": lambda x, w, b: ((y := x + b), F.layer_norm(y, (length,), w)),
        "std": lambda x, w, b: x.float().std(-1),
    }
    check(functions, [x, weight, bias], slack=16)


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_random_numbers_are_those_of_their_definition(length: int) -> None:
    functions: dict[str, Function] = {
        "uniform": lambda seed: torch.ops.kiln.random(seed, 3, "uniform", [3, length], None, torch.float32),
        "half": lambda seed: torch.ops.kiln.random(seed, 4, "uniform", [3, length], None, torch.bfloat16),
        "normal": lambda seed: torch.ops.kiln.random(seed, 5, "normal", [length], None, torch.float32),
        "integers": lambda seed: torch.ops.kiln.randint(seed, 6, -5, 1000, [3, length], None),
        "mask of a row": lambda seed: torch.where(
            torch.ops.kiln.random(seed, 7, "uniform", [3, length], None, torch.float32) > 0.1, 1.5, 0.0
        ).sum(-1),
    }
    check(functions, [torch.tensor([0x1234_5678_9ABC_DEF0])], slack=8)


def test_nan_infinities_and_zeros_in_extrema() -> None:
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor([[1.0, nan, 3.0] * 50, [-inf, -inf, -inf] * 50, [0.0, -0.0, 0.0] * 50, [2.0, inf, nan] * 50])
    check({k: _REDUCTIONS[k] for k in ("amax", "amin", "argmax", "argmin")}, [rows])


@settings(deadline=None, max_examples=25, derandomize=True, database=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.data(),
)
def test_views_of_any_strides(dtype: torch.dtype, shape: list[int], data: st.DataObject) -> None:
    """Permuted, narrowed, expanded and stepped operands, reduced over any dimension."""
    order = data.draw(st.permutations(range(len(shape))))
    dim = data.draw(st.integers(0, len(shape) - 1))
    step = data.draw(st.integers(1, 3))
    start = data.draw(st.integers(0, shape[0] - 1))

    def viewed(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x.permute(order)[..., ::step] + y.permute(order)[..., ::step]
        return [z, z.sum(dim), x[start:] * 2, x.narrow(0, start, 1).expand(shape) - y]

    check({"views": viewed}, [specimen(dtype, shape, 1, tame=True), specimen(dtype, shape, 2, tame=True)], slack=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted(ops.OPS.keys() - ops.RANDOM))
def test_operations_that_a_card_computes_call_no_library(name: str, dtype: torch.dtype) -> None:
    f, spec = Instructions(ModuleBuilder(HOPPER)), ops.OPS[name]
    if name.startswith(("bitwise", "logical", "trunc_divide")):
        return
    operands = [Value(f"%a{k}", dtype, 4) for k in range(spec.arity)]
    if spec.kind == "selection":
        operands[0] = Value("%a0", torch.bool, 4)
    result = torch.bool if spec.kind in ("comparison", "test") else dtype
    try:
        apply(f, name, operands, result)
        called = set(re.findall(r"declare [^@]*@([\w.]+?)(?:\.v\d+f\d+|\.f\d+|\()", f.module.text()))
        by_instructions = called <= _INSTRUCTIONS
    except UnsupportedError:
        by_instructions = False
    assert by_instructions == HOPPER.computes(name, dtype)


_INSTRUCTIONS = {
    f"llvm.{name}"
    for name in (
        *("fma", "floor", "ceil", "trunc", "roundeven", "sqrt", "fabs", "copysign", "maximum", "minimum", "maxnum"),
        *("minnum", "rint", "arithmetic.fence", "fshl.i32"),
    )
}


def test_threads_share_columns_where_few_would_be_at_work() -> None:
    def sharers(rows: int, columns: int) -> set[int]:
        kernels = kernels_of(plan_for(lambda x: x.sum(0), [torch.empty(rows, columns)])).values()
        mappings = [kernel.mapping for kernel in kernels]
        return {mapping.row_threads for mapping in mappings if isinstance(mapping, GpuMapping)}

    assert sharers(512, 1024) == {16}
    assert sharers(8, 1024) == {4}  # two values for each
    assert sharers(64, 1 << 19) == {1}  # results enough for all threads of a card


def test_groups_share_columns_of_short_lanes() -> None:
    (kernel,) = kernels_of(plan_for(lambda x: x.sum((0, 2)), [torch.empty(64, 64, 49)])).values()
    assert isinstance(kernel.mapping, GpuMapping)
    assert (kernel.mapping.lane_threads, kernel.mapping.groups) == (32, 32)


@pytest.mark.parametrize(
    ("function", "shape", "count"),
    [
        (lambda x: x.softmax(-1), (100, 16384), 1),
        (lambda x: x.softmax(0), (256, 2048), 1),
        (lambda x: x.sum(0), (8192, 1024), 2),
        (lambda x: x.sum(-1), (16, 1 << 18), 2),
        (lambda x: x.sum(), (1 << 20,), 2),
        (lambda x: x.sum(), (1 << 15,), 1),
    ],
)
def test_long_reductions_of_few_results_are_split_among_blocks(
    function: Function, shape: tuple[int, ...], count: int
) -> None:
    kernels = kernels_of(plan_for(function, [torch.empty(shape)])).values()
    assert len(kernels) == count
    grids = [kernel.mapping.grid for kernel in kernels if isinstance(kernel.mapping, GpuMapping)]
    assert count == 1 or max(int(str(grid)) for grid in grids) >= 64


def test_a_row_is_read_from_memory_once() -> None:
    (kernel,) = kernels_of(plan_for(lambda x: torch.softmax(x, -1), [torch.randn(4, 768)])).values()
    assembly = assembly_of(module_of({"kernel0": kernel}), HOPPER.processor)
    assert assembly.count("ld.global.nc.v4.b32") == assembly.count("ld.global") == 768 // 4 // 32
    assert assembly.count("st.global.v4.b32") == assembly.count("st.global") == 768 // 4 // 32
    assert "local" not in assembly
