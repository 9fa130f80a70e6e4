"""Reductions and softmax against eager: dtypes, dimensions, ties, NaN, empty dimensions, layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lowering.against_eager import DTYPES, FLOATS, check, compiled, layouts, specimen
from tests.lowering.test_pointwise import name_of

aten = torch.ops.aten
Function = Callable[..., Any]


def sums(rank: int) -> dict[str, Function]:
    """Reductions whose result depends on the order of additions, over every kind of dimension list."""
    found: dict[str, Function] = {"sum": torch.sum, "prod": torch.prod, "mean": torch.mean, "var": torch.var}
    for dims in dimension_lists(rank):
        for keep in (False, True):
            k = {"keepdim": keep}
            found[f"sum {dims} {keep}"] = lambda x, d=dims, k=k: x.sum(d, **k)
            found[f"mean {dims} {keep}"] = lambda x, d=dims, k=k: x.mean(d, **k)
            found[f"var {dims} {keep}"] = lambda x, d=dims, k=k: x.var(d, **k)
            found[f"var biased {dims} {keep}"] = lambda x, d=dims, k=k: x.var(d, correction=0, **k)
            found[f"var_mean {dims} {keep}"] = lambda x, d=dims, k=k: torch.var_mean(x, d, **k)
    for dim in range(rank):
        found[f"prod {dim}"] = lambda x, d=dim: x.prod(d)
        found[f"sum float64 {dim}"] = lambda x, d=dim: x.sum(d, dtype=torch.float64)
        found[f"sum int32 {dim}"] = lambda x, d=dim: (x > 0).sum(d, dtype=torch.int32)
    return found


def choices(rank: int) -> dict[str, Function]:
    """Reductions that pick or test elements: the same bits in any order."""
    found: dict[str, Function] = {
        "any": torch.any,
        "all": torch.all,
        "argmax": torch.argmax,
        "argmin": torch.argmin,
        "max": torch.max,
        "min": torch.min,
        "argmax flat kept": lambda x: x.argmax(None, keepdim=True),
    }
    for dims in dimension_lists(rank):
        for keep in (False, True):
            k = {"keepdim": keep}
            found[f"amax {dims} {keep}"] = lambda x, d=dims, k=k: x.amax(d, **k)
            found[f"amin {dims} {keep}"] = lambda x, d=dims, k=k: x.amin(d, **k)
            found[f"any {dims} {keep}"] = lambda x, d=dims, k=k: torch.any(x, d, **k)
    for dim in range(rank):
        for keep in (False, True):
            k = {"keepdim": keep}
            found[f"argmax {dim} {keep}"] = lambda x, d=dim, k=k: x.argmax(d, **k)
            found[f"argmin {dim} {keep}"] = lambda x, d=dim, k=k: x.argmin(d, **k)
            found[f"max {dim} {keep}"] = lambda x, d=dim, k=k: tuple(x.max(d, **k))
            found[f"min {dim} {keep}"] = lambda x, d=dim, k=k: tuple(x.min(d, **k))
            found[f"all {dim} {keep}"] = lambda x, d=dim, k=k: x.all(d, **k)
    return found


def dimension_lists(rank: int) -> list[tuple[int, ...]]:
    """First, last, middle, several and all dimensions."""
    wanted = [(0,), (-1,), (rank // 2,), tuple(range(rank)), (0, rank - 1), tuple(range(1, rank))]
    return list(dict.fromkeys(d for d in wanted if rank and d and len({x % rank for x in d}) == len(d)))


# Without a lowering: bool has no order of its own, and any and all of uint8 keep that dtype.
_MAY_CALL = {
    torch.bool: ("aten.argmax.default", "aten.argmin.default"),
    torch.uint8: ("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_sums_over_any_dimensions_are_close_to_eager(dtype: torch.dtype) -> None:
    x = specimen(dtype, (3, 5, 34), tame=True)
    check(sums(3), [x], slack=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_extrema_and_tests_give_the_bits_of_eager(dtype: torch.dtype) -> None:
    x = specimen(dtype, (3, 5, 34), tame=True) + (0 if dtype == torch.bool else 1)  # small integers: many ties
    check(choices(3), [x], exact=True, extern=_MAY_CALL.get(dtype, ()))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 7), (2, 130), (3, 1, 2), (70, 3)], ids=name_of)
def test_reductions_of_every_shape(shape: tuple[int, ...]) -> None:
    x = specimen(torch.float32, shape, tame=True)
    whole = {"aten.argmax.default", "aten.argmin.default"} if not shape else ()
    check(sums(len(shape)), [x], slack=8)
    check(choices(len(shape)), [x], exact=True, extern=tuple(whole))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("at", [0, 1, 17, 33, 40])
def test_nan_wins_every_extremum_wherever_it_stands(dtype: torch.dtype, at: int) -> None:
    x = specimen(dtype, (3, 41), tame=True)
    x[1, at] = float("nan")
    x[2, at:] = float("nan")
    check(choices(2), [x], exact=True)


def test_the_first_of_equal_extrema_is_found() -> None:
    for count in (3, 16, 17, 40, 130):
        x = torch.zeros(4, count)
        x[1, count // 2 :] = 1
        x[2, -1] = -1
        x[3] = float("-inf")
        check({k: f for k, f in choices(2).items() if "arg" in k or "max" in k or "min" in k}, [x], exact=True)
        check({"argmax": lambda x: x.argmax(0), "argmin": lambda x: x.argmin(0)}, [x.t().contiguous()], exact=True)


def test_infinities_reduce_as_in_eager() -> None:
    x = specimen(torch.float32, (4, 50), tame=True)
    x[0, 3], x[1, 5], x[2, 0], x[2, 1] = float("inf"), float("-inf"), float("inf"), float("-inf")
    check(choices(2), [x], exact=True)
    # Not var_mean: the mean of a row with one infinity is that infinity, where eager's running mean gets to NaN.
    check({k: f for k, f in sums(2).items() if "prod" not in k and "var_mean" not in k}, [x], slack=8)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 4)], ids=name_of)
def test_empty_dimensions_reduce_to_the_identity(shape: tuple[int, ...]) -> None:
    x = specimen(torch.float32, shape)
    # amax of nothing is an error; over a dimension that is not empty it is an empty result, which runs as eager.
    check(sums(len(shape)), [x])
    extern = ("aten.amax.default", "aten.amin.default", "aten.max.dim", "aten.min.dim")
    extern += ("aten.argmax.default", "aten.argmin.default")
    check(choices(len(shape)), [x], exact=True, extern=extern)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "offset"])
def test_reductions_of_every_layout(layout: str) -> None:
    x = layouts(specimen(torch.float32, (6, 5, 35), tame=True))[layout]
    check(sums(3), [x], slack=8)
    check(choices(3), [x], exact=True)


@pytest.mark.parametrize("shape", [(40_000,), (3, 50_000), (50_000, 3), (100, 41, 30)], ids=name_of)
def test_long_reductions_are_split_without_changing_the_result(shape: tuple[int, ...]) -> None:
    x = specimen(torch.float32, shape, tame=True)
    functions: dict[str, Function] = {"sum": torch.sum, "amax": torch.amax, "argmin": torch.argmin, "var": torch.var}
    for dim in range(len(shape)):
        functions[f"sum {dim}"] = lambda x, d=dim: x.sum(d)
        functions[f"amax {dim}"] = lambda x, d=dim: x.amax(d)
        functions[f"any {dim}"] = lambda x, d=dim: (x > 4).any(d)
        functions[f"mean {dim}"] = lambda x, d=dim: x.mean(d)
    check(functions, [x], slack=100)


def test_integer_sums_wrap_as_in_eager() -> None:
    x = torch.full((50,), torch.iinfo(torch.int64).max)
    check({"sum": torch.sum, "prod": torch.prod}, [x], exact=True)


def test_half_precision_sums_accumulate_in_float32() -> None:
    """Added up in bfloat16, four thousand ones give 256."""
    x = torch.ones(4, 4096, dtype=torch.bfloat16)
    check(
        {"sum": lambda x: x.sum(1), "sum columns": lambda x: x.t().sum(0), "mean": lambda x: x.mean()}, [x], exact=True
    )


# -- softmax ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(7,), (4, 33), (2, 3, 17), (5, 1), ()], ids=name_of)
def test_softmax_along_any_dimension(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, g = specimen(dtype, shape, tame=True), specimen(dtype, shape, seed=1, tame=True)
    functions: dict[str, Function] = {}
    for dim in range(-1, max(len(shape), 1)):
        functions[f"softmax {dim}"] = lambda x, g, d=dim: torch.softmax(x, d)
        functions[f"log_softmax {dim}"] = lambda x, g, d=dim: torch.log_softmax(x, d)
        functions[f"softmax backward {dim}"] = lambda x, g, d=dim: aten._softmax_backward_data(g, x, d, x.dtype)
        functions[f"log_softmax backward {dim}"] = lambda x, g, d=dim: aten._log_softmax_backward_data(g, x, d, x.dtype)
        functions[f"to float {dim}"] = lambda x, g, d=dim: torch.softmax(x, d, dtype=torch.float32)
    check(functions, [x, g], slack=8)


def test_softmax_of_awkward_rows() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -inf, 0.0], [-inf] * 3, [inf, 0.0, 1.0], [nan, 0.0, 1.0], [1e4, -1e4, 3e38], [88.0] * 3])
    check({"softmax": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(1)}, [x], slack=2)
    check({"softmax": lambda x: x.softmax(0), "log_softmax": lambda x: x.log_softmax(0)}, [x], slack=2)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)], ids=name_of)
def test_softmax_of_nothing(shape: tuple[int, ...]) -> None:
    check({"softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(0)}, [torch.zeros(shape)])


# Sizes, the dimensions reduced, and how the memory is laid out.
VARIANCES: dict[str, tuple[tuple[int, ...], int | tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "one": ((3_000_001,), 0, lambda x: x),
    "rows": ((7, 40_000), 1, lambda x: x),
    "short rows": ((300, 700), 1, lambda x: x),
    "columns": ((50_000, 5), 0, lambda x: x),
    "many columns": ((3000, 130), 0, lambda x: x),
    "channels": ((8, 6, 40, 40), (0, 2, 3), lambda x: x),
    "channels last": ((8, 6, 40, 40), (0, 2, 3), lambda x: x.to(memory_format=torch.channels_last)),
    "transposed": ((9, 20_000), 0, lambda x: x.t()),
    "sliced": ((9, 40_000), 1, lambda x: x[:, ::3]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", VARIANCES)
def test_a_variance_is_right_to_the_last_bit_whatever_the_mean(name: str, dynamic: bool) -> None:
    """As eager's, which adds up in float64."""
    shape, dim, lay_out = VARIANCES[name]

    def function(x: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shifted = x + offset
        return (*torch.var_mean(shifted, dim), torch.std(shifted, dim, correction=0), shifted)

    run = torch.compile(function, backend="kiln", fullgraph=True, dynamic=dynamic, options={"fallback": False})
    x = lay_out(torch.randn(shape))
    for offset in (0.0, 1000.0, -3e5):
        spread, average, deviation, shifted = run(x, torch.tensor(offset))
        wide = shifted.double()
        wanted = (wide.var(dim), wide.mean(dim), wide.std(dim, correction=0))
        for got, exact in zip((spread, average, deviation), wanted, strict=True):
            error = ((got.double() - exact).abs() / exact.abs()).max().item()
            assert error <= 2**-24 * 1.001, (offset, error)


def test_variances_beyond_the_range_of_the_dtype_are_infinite_and_their_roots_are_not() -> None:
    steps = torch.linspace(-1, 1, 100)
    x = torch.stack([steps * 3e38, steps * 1e20, steps.abs() * 1e19, torch.full((100,), 3e38), steps * 1e25])
    functions: dict[str, Callable[..., Any]] = {
        "var": lambda x: x.var(1),
        "std": lambda x: x.std(1),
        "std_mean": lambda x: torch.std_mean(x, 1)[0],
    }
    check(functions, [x])
    wide = x.double()
    (roots,) = compiled(lambda x: (x.std(1),), [x])(x)
    assert torch.isfinite(roots).all()
    torch.testing.assert_close(roots.double(), wide.std(1), rtol=2**-23, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_of_values_far_from_zero_is_as_accurate_as_in_eager(layout: torch.memory_format) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True)

    x = (torch.randn(16, 12, 20, 20) + 1000).to(memory_format=layout)
    run = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False})
    exact = function(x.double())
    # The mean is saved as float32, so half of its last place, 2**-15, is what both may be off by.
    ours, eager = ((f(x).double() - exact).abs().max().item() for f in (run, function))
    assert ours <= max(eager, 1.1 * 2**-15)
