"""Long reductions in parts: the number of parts depends on sizes alone."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.against_eager import check, compiled, specimen
from tests.schedule.test_fusion import plan_of
from torchkiln.schedule.plan import Launch


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
        return [str(step.kernel.phases) for step in plan.steps if isinstance(step, Launch)]

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
