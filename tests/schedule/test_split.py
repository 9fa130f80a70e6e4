"""Long reductions in parts: the number of parts depends on sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torchkiln
from tests.lowering.against_eager import check, compiled, specimen
from tests.schedule.test_fusion import plan_of
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.program import Buffer, Loop, Program
from torchkiln.schedule.limits import CPU
from torchkiln.schedule.plan import Launch
from torchkiln.schedule.split import split_reductions


@pytest.mark.parametrize("count", [32768, 40_001, 99_991, 300_000])
def test_a_long_sum_runs_in_parts_that_add_up(count: int) -> None:
    x = torch.arange(count, dtype=torch.int64) % 1000
    check({"sum": torch.sum, "max": torch.max, "all": lambda x: (x >= 0).all()}, [x], exact=True)
    y = specimen(torch.float32, (count,), tame=True)
    (total,) = compiled(lambda y: (y.sum(),), [y])(y)
    assert abs(float(total) - float(y.double().sum())) < 1e-5 * float(y.double().abs().sum())


def test_a_short_sum_is_one_kernel() -> None:
    assert len(plan_of(lambda x: (x.sum(),), torch.zeros(1000)).steps) == 1


def test_the_plan_does_not_depend_on_the_number_of_threads() -> None:
    def text() -> list[str]:
        plan = plan_of(lambda x: (x.sum(), x.sum(0), x.amax(1)), torch.zeros(300, 700))
        return [str(step.kernel.nest.phases) for step in plan.steps if isinstance(step, Launch)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = text()
        torch.set_num_threads(2)
        assert text() == one
    finally:
        torch.set_num_threads(threads)


def test_parts_that_do_not_divide_the_length_ignore_what_lies_beyond() -> None:
    """The memory after the input holds values that would win every reduction."""
    memory = torch.full((70_000,), 1e9)
    memory[:65_537] = torch.rand(65_537)
    x = memory[:65_537]
    check({"max": torch.max, "any": lambda x: (x > 1).any(), "argmax": torch.argmax}, [x], exact=True)
    check({"sum": torch.sum, "prod": lambda x: (x * 0 + 1).prod()}, [x], slack=100)


def _divergence(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    return (((x - x.logsumexp(1, keepdim=True)) * y).sum(),)


def test_a_sum_over_rows_joins_what_is_computed_by_rows() -> None:
    plan = plan_of(_divergence, torch.zeros(256, 1000), torch.zeros(256, 1000))
    assert len(plan.steps) == 2  # all by rows, then the sum of the rows
    assert plan.arena_bytes < 256 * 1000


@pytest.mark.parametrize("shape", [(256, 1000), (33, 4001), (1024, 512), (1025, 512), (40, 3, 1701), (3, 50_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_sums_over_all_dimensions_are_those_of_eager(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).mul(1000).to(dtype)
    functions = {"sum": torch.sum, "max": torch.max, "any": lambda x: (x == x[-1].flatten()[-1]).any()}
    check(functions, [x], slack=100, exact=not dtype.is_floating_point)


_ROWS = ix.Size("m", 2, 1 << 40, 128)
_WIDTH = ix.Size("n", 2, 1 << 40, 256)


def _sum_of(*shape: ix.Size | int, kept: int = 0, given: tuple[str, ...] = ()) -> list[Loop]:
    """The sum of a contiguous buffer of ``shape`` over all but its first ``kept`` dimensions, split."""
    extents = [ix.extent(ix.of(n)) if isinstance(n, ix.Size) else n for n in shape]
    variables = tuple(ix.Var(f"v{k}", n) for k, n in enumerate(extents))
    subscripts = tuple(ix.of(v) for v in variables)
    x = Buffer("x", torch.float32, tuple(extents), ix.contiguous_strides(extents))
    of_results = Buffer("z", torch.float32, tuple(extents[:kept]), ix.contiguous_strides(extents[:kept]))
    value: ex.Expr = ex.Load("x", subscripts, torch.float32)
    for name in given:  # what there is one of for each result
        value = ex.simplify("sub", (value, ex.Load(name, subscripts[:kept], torch.float32)), torch.float32)
    loop = Loop("z", variables[:kept], value, subscripts[:kept], "sum", variables[kept:])
    buffers = {"x": x, **{name: replace(of_results, name=name) for name in ("z", *given)}}
    program = Program((), (), buffers, (loop,), ())
    return [o for o in split_reductions(program, CPU).operations if isinstance(o, Loop)]


def test_parts_of_sizes_known_at_run_time_divide_no_index() -> None:
    for parts, _ in (_sum_of(_ROWS, _WIDTH, _WIDTH, kept=0), _sum_of(4, _WIDTH, _WIDTH, kept=1)):
        (load,) = ex.loads(parts.value)
        assert "%" not in repr(load.subscripts)
        assert "// n" not in repr(load.subscripts)


def test_a_sum_over_rows_of_symbolic_number_and_length_has_a_part_for_each_row() -> None:
    long = ix.Size("k", 2, 1 << 40, 2000)
    parts, _ = _sum_of(_ROWS, long)
    assert [v.extent for v in parts.ranges] == [ix.of(_ROWS)]
    assert [v.extent for v in parts.reduced] == [ix.of(long)]


def test_what_is_read_once_for_each_result_does_not_decide_about_parts() -> None:
    assert len(_sum_of(256, 1000, kept=1)) == 1
    assert len(_sum_of(256, 1000, kept=1, given=("greatest", "total"))) == 1


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 2), (2,), (0, 2)])
def test_reductions_of_symbolic_sizes_are_those_of_eager_for_any_sizes(dims: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(dims), x.amax(dims), (x - x.amin(dims, keepdim=True)).sum(dims)

    made = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    before = torchkiln.stats().graphs
    for shape in [(3, 300, 400), (2, 2, 2), (40, 33, 301), (3, 1025, 31), (700, 2, 300)]:
        # Whole numbers, so that sums are exact in any order.
        x = torch.randint(-8, 8, shape).float()
        for mine, eagers in zip(made(x), function(x), strict=True):
            assert torch.equal(mine, eagers)
    assert torchkiln.stats().graphs == before + 1


@pytest.mark.parametrize(
    ("first", "later"),
    [((50,), (4_000_000,)), ((1000,), (4_000_000,)), ((256, 1000), (2, 2_000_000)), ((256, 1000), (2_000_000, 2))],
)
@pytest.mark.parametrize("function", [lambda x: (x * x).mean(), lambda x: x.var(), lambda x: x.sum(0).amax()])
def test_sums_keep_their_digits_at_sizes_far_from_those_of_the_first_call(
    function: Callable[[Tensor], Tensor], first: tuple[int, ...], later: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    compiled(torch.rand(first))
    x = torch.rand(later)
    exact = function(x.double())
    error, eagers = ((result.double() - exact).abs() / exact for result in (compiled(x), function(x)))
    # A sum of all terms one after the other is off by 1e-5 here.
    assert error <= eagers + 4e-7
