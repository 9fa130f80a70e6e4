"""Generated kernels: vector tails, register widths, tiles, guarded memory, threads, and the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.against_eager import check, compiled, difference, specimen

Function = Callable[..., Any]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


ROWS: dict[str, Function] = {
    "pointwise": lambda x: x * 2 + 1,
    "sum": lambda x: x.sum(-1),
    "column sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "column argmin": lambda x: x.argmin(0),
    "softmax": lambda x: x.softmax(-1),
    "column softmax": lambda x: x.softmax(0),
    "transpose": lambda x: x.t() + 1,
    "any": lambda x: (x > 1).any(-1),
    "norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
}


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200])
def test_every_length_of_tail(width: int) -> None:
    """Lengths around each vector width: full vectors, a tail, both, neither."""
    check(ROWS, [specimen(torch.float32, (5, width), tame=True)], slack=8)


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_every_register_width_gives_the_same_results(bits: int, dtype: torch.dtype) -> None:
    functions = {k: f for k, f in ROWS.items() if dtype.is_floating_point or ("norm" not in k and "softmax" not in k)}
    check(functions, [specimen(dtype, (19, 37), tame=True)], slack=8, vector_bits=bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool], ids=str)
@pytest.mark.parametrize(
    "shape", [(16, 16), (16, 32), (32, 48), (17, 33), (5, 40), (40, 5), (64, 16), (100, 30)], ids=str
)
def test_reads_across_the_vector(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Operands that run along different axes: one of them is read in tiles or gathered."""
    x, y = specimen(dtype, shape, tame=True), specimen(dtype, shape[::-1], 1, tame=True)
    functions = {
        "copy": lambda x, y: x.t().contiguous(),
        "both": lambda x, y: x == y.t(),
        "both transposed": lambda x, y: x.t() | y if dtype in (torch.int8, torch.bool) else x.t() + y,
        "two results": lambda x, y: (y.t().clone(), x.t().contiguous()),
        "strided": lambda x, y: x[:, ::2] == y.t()[:, ::2],
    }
    check(functions, [x, y], exact=True)


def test_a_store_at_the_place_of_a_read_across_the_vector() -> None:
    """The address of the first row of a tile must not serve for the others."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x, y = specimen(dtype, (16, 8, 4, 1), tame=True), specimen(dtype, (16, 8, 4, 2), 1, tame=True)
        check({"sum": lambda x, y: x + y[..., :1]}, [x, y], exact=True)


def test_nothing_beyond_a_result_is_written() -> None:
    """Results into slices of larger memory, at every tail length."""
    for width in (1, 3, 8, 17, 33, 65):
        memory = torch.full((6, width + 70), -7.0)
        inside = memory[1:5, 2 : 2 + width]
        run = compiled(lambda x, y: (x.copy_(y * 2),), [inside, torch.zeros(4, width)])
        run(inside, torch.ones(4, width))
        assert int((memory == 2).sum()) == 4 * width
        assert int((memory == -7).sum()) == memory.numel() - 4 * width


GUARD = 72  # elements before and after each result, more than a register holds
MANY: dict[str, Function] = {
    # Library calls leave no vector register as it was: the mask of a tail must be kept across them.
    "calls first": lambda x, y: (x.fmod(y), y.remainder(x), x > y, x * y, x.isnan(), (x * 5).long(), x.int()),
    "calls last": lambda x, y: (x < y, x + y, x.char(), (y * 3).long(), x.double(), y.fmod(x), (2 % x) == y),
    "bytes and words": lambda x, y: (x.fmod(y) > 1, x.char(), x.short(), y.int() % 7, x.bfloat16(), y.half(), x.sign()),
    "bytes": lambda x, y: (x > y, x == y, x.isnan(), x.char(), y.byte(), x.logical_xor(y), x.fmod(y) < 1),
}


def check_between_guards(run: Function, function: Function, inputs: list[torch.Tensor]) -> None:
    """``run`` of memory for the results of ``function`` and of its inputs writes that memory and nothing beside it."""
    expected = function(*inputs)
    memory = [torch.full((r.numel() + 2 * GUARD,), 77).to(r.dtype) for r in expected]
    wanted = [m.clone() for m in memory]
    for whole, result in zip(wanted, expected, strict=True):
        whole[GUARD:-GUARD] = result
    run([m[GUARD:-GUARD] for m in memory], *inputs)
    for k, (got, whole) in enumerate(zip(memory, wanted, strict=True)):
        assert difference(got, whole) is None, f"result {k} of {[tuple(x.shape) for x in inputs]}"


def into_memory(function: Function, *, dynamic: bool, bits: int) -> Function:
    """``function``, compiled, with a list of tensors before its inputs that its results are written to."""

    def into(outs: list[torch.Tensor], *inputs: torch.Tensor) -> None:
        for out, value in zip(outs, function(*inputs), strict=True):
            out.copy_(value)

    torch.compiler.reset()
    options: Any = {"fallback": False, "vector_bits": bits}
    return torch.compile(into, backend="kiln", fullgraph=True, dynamic=dynamic, options=options)


def everything(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [result for function in MANY.values() for result in function(x, y)]


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_nothing_beside_results_of_several_dtypes_is_written(dtype: torch.dtype, bits: int) -> None:
    """Tails of every length, in kernels of few results."""
    for function in MANY.values():
        run = into_memory(function, dynamic=True, bits=bits)
        for width in range(2, 67):
            x = torch.linspace(1.25, 40, width).to(dtype)
            check_between_guards(run, function, [x, x.flip(0) + 1])


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_nothing_beside_more_results_than_there_are_registers_is_written(dynamic: bool, bits: int) -> None:
    run = into_memory(everything, dynamic=dynamic, bits=bits)
    for width in range(2, 67) if dynamic else (7, 77):
        x = torch.linspace(1.25, 40, width)
        check_between_guards(run, everything, [x, x.flip(0) + 1])


@pytest.mark.parametrize("bits", [128, 256, 512])
def test_nothing_beside_a_narrowed_result_is_written_where_a_symbolic_size_leaves_one(bits: int) -> None:
    """The length of the tail follows from the size's expression, which the code generator below may make use of."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = F.pad(x[:, None].expand(-1, 64).reshape(-1), (0, 1), value=3.0)
        return padded.char(), padded.short(), padded.byte(), (padded * 3).long().int(), padded.double().long().char()

    run = into_memory(function, dynamic=True, bits=bits)
    for rows in (2, 3, 4):
        check_between_guards(run, function, [torch.linspace(1.25, 40, rows)])


def test_nothing_beyond_an_input_is_read() -> None:
    """Each input ends at the end of its memory: a vector read beyond it would show NaN or crash."""
    for width in (1, 5, 16, 31, 66):
        memory = torch.full((4 * width + 64,), float("nan"))
        memory[: 4 * width] = torch.arange(4 * width)
        x = memory[: 4 * width].view(4, width)
        check({"sum": lambda x: x.sum(), "rows": lambda x: x.sum(1), "max": lambda x: x.amax(0)}, [x], slack=8)


LARGE: dict[str, Function] = {
    "sum": lambda x: x.sum(),
    "row sum": lambda x: x.sum(1),
    "column sum": lambda x: x.sum(0),
    "variance": lambda x: x.var(1),
    "whole variance": lambda x: x.var(),
    "softmax": lambda x: x.softmax(1),
    "column softmax": lambda x: x.softmax(0),
    "layer norm": lambda x: F.layer_norm(x, (x.shape[1],)),
    "batch statistics": lambda x: x.view(x.shape[0], 4, -1).var((0, 2)),
    "product": lambda x: (x * 0.001 + 1).prod(0),
    "chain": lambda x: (x.sin() * x.exp()).sum(0) + x.mean(),
}


@pytest.mark.parametrize("shape", [(200, 640), (3, 60_000), (60_000, 4), (777, 132)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_the_same_bits_for_any_number_of_threads_and_every_run(
    threads: Callable[[int], None], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = specimen(dtype, shape, tame=True)

    def together(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(f(x) for f in LARGE.values())

    runs = []
    for count in (1, 2):
        threads(count)
        run = compiled(together, [x], parallel_threshold=1024)
        runs += [run(x) for _ in range(3)]
        threads(3 - count)
        runs.append(run(x))  # compiled for one number of threads, run on another
    for results in runs[1:]:
        for name, first, again in zip(LARGE, runs[0], results, strict=True):
            assert torch.equal(first, again), name


@pytest.mark.parametrize("shape", [(200, 640), (3, 60_000), (60_000, 4)], ids=str)
def test_large_results_are_close_to_eager(threads: Callable[[int], None], shape: tuple[int, int]) -> None:
    threads(2)
    check({k: f for k, f in LARGE.items() if k != "product"}, [specimen(torch.float64, shape, tame=True)], slack=2000)


@pytest.mark.parametrize("name", ["softmax", "layer norm", "variance", "row sum"])
def test_a_small_input_gives_the_bits_it_has_within_a_large_one(name: str) -> None:
    """A row's result does not depend on how many rows there are."""
    x = specimen(torch.float32, (300, 257), tame=True)
    (whole,) = compiled(lambda x: (LARGE[name](x),), [x])(x)
    part = x[:9].clone()
    (few,) = compiled(lambda x: (LARGE[name](x),), [part])(part)
    assert torch.equal(whole[:9], few)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_rows_of_symbolic_length_are_summed_as_well_as_long_ones(dtype: torch.dtype) -> None:
    """Rows of up to two chunks of a sum have a loop of their own; one chunk is 1,024 or 512 numbers with AVX-512."""
    torch._dynamo.reset()
    summed = torch.compile(lambda x: x.sum(-1), backend="kiln", dynamic=True, options={"fallback": False})
    summed(torch.ones(5, 64, dtype=dtype))
    for length in (2, 63, 64, 100, 1023, 1024, 1025, 2047, 2048, 2049, 2112, 16_384, 20_000):
        whole = torch.randint(-8, 8, (5, length)).to(dtype)
        assert torch.equal(summed(whole), whole.sum(-1)), length
    # Rounded the same way each time: hundreds of times as far off if all terms of a lane were added in a row.
    x = torch.full((2, 3_000_000), 0.1, dtype=dtype)
    assert ((summed(x) - 3e6 * x[:, 0]).abs() <= 3e5 * 32 * torch.finfo(dtype).eps).all()


def _terms(count: int) -> dict[str, torch.Tensor]:
    """Terms of sums that lose digits in different ways: equal ones are all rounded in the same direction."""
    torch.manual_seed(count)
    uniform = torch.rand(count)
    signs = 1 - 2 * (torch.arange(count) % 2)
    return {
        "tenths": torch.full((count,), 0.1),
        "thirds": torch.full((count,), 1 / 3),
        "uniform": uniform,
        "sorted": uniform.sort().values,
        "alternating": signs * (1 + uniform / 8),
        "large, then small": torch.cat([torch.full((count // 100,), 1e6), torch.ones(count - count // 100)]),
    }


# Functions, how large what they add up is, and shapes.
LONG_SUMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "all": (torch.sum, lambda x: x.abs().sum(), (2_000_000,)),
    "mean": (torch.mean, lambda x: x.abs().mean(), (500_000,)),
    "few rows": (lambda x: x.sum(1), lambda x: x.abs().sum(1), (3, 300_000)),
    "rows": (lambda x: x.sum(1), lambda x: x.abs().sum(1), (50, 10_000)),
    "rows of a length without factors": (lambda x: x.sum(1), lambda x: x.abs().sum(1), (50, 9_973)),
    "columns": (lambda x: x.sum(0), lambda x: x.abs().sum(0), (20_000, 64)),
    "many columns": (lambda x: x.sum(0), lambda x: x.abs().sum(0), (2_000, 640)),
    "channels, short rows": (lambda x: x.sum((0, 2)), lambda x: x.abs().sum((0, 2)), (900, 10, 130)),
    "channels, long rows": (lambda x: x.sum((0, 2)), lambda x: x.abs().sum((0, 2)), (40, 10, 3_000)),
    "squares": (lambda x: x.square().sum(1), lambda x: x.square().sum(1), (8, 50_000)),
    "squared error": (F.mse_loss, lambda x, y: (x - y).square().mean(), (500_000,)),
    "softmax": (
        lambda x: x.mul(1e-7).softmax(1).amax(1),
        lambda x: x.mul(1e-7).softmax(1).amax(1),
        (4, 100_000),
    ),
}


@pytest.mark.parametrize(("dtype", "dynamic"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("name", LONG_SUMS)
def test_long_sums_keep_the_digits_that_those_of_eager_keep(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    """Sums of half types are compared as float32, before they are rounded."""
    function, magnitude, shape = LONG_SUMS[name]

    def summed(*xs: torch.Tensor) -> torch.Tensor:
        return function(*(x.float() for x in xs))

    torch._dynamo.reset()
    mine = torch.compile(summed, backend="kiln", dynamic=dynamic, options={"fallback": False, "adaptive": False})
    operands = 2 if name == "squared error" else 1
    if dynamic:
        mine(*[torch.ones([5] * len(shape), dtype=dtype)] * operands)
    worst = {"kiln": 0.0, "eager": 0.0}
    for terms in _terms(math.prod(shape)).values():
        xs = [(terms * factor).to(dtype).view(shape) for factor in (1, -0.7)[:operands]]
        wide = [x.double() for x in xs]
        exact, size = function(*wide), magnitude(*wide)
        for who, run in (("kiln", mine), ("eager", summed)):
            worst[who] = max(worst[who], float(((run(*xs).double() - exact).abs() / size).max()))
    # Eager is lucky with some: a run of 16 terms may be off by 8 units of the last place, and each level has one.
    assert worst["kiln"] <= max(4 * worst["eager"], 5 * torch.finfo(torch.float32).eps)
