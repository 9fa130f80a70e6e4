"""Lanes and fusion: a large result is not stored element by element for the sake of one kernel less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import check
from tests.schedule.test_fusion import plan_of
from torchkiln.schedule.kernel import Kernel, Store
from torchkiln.schedule.plan import Launch
from torchkiln.schedule.tiles import tiled_accesses

Function = Callable[..., Any]


def _kernels(function: Function, *inputs: torch.Tensor) -> list[Kernel]:
    return [step.kernel for step in plan_of(function, *inputs).steps if isinstance(step, Launch)]


def _stores_one_by_one(kernel: Kernel) -> bool:
    nest = kernel.nest
    if nest.lane is None:
        return False
    inside = [s for phase in nest.phases for s in phase.inside if isinstance(s, Store)]
    tile = kernel.mapping.tile
    tiled = () if tile is None else tiled_accesses(nest, tile).stores
    return any(s.offset.coefficient(nest.lane) not in (0, 1) for s in inside if s not in tiled)


def _across(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.t().log_softmax(1).contiguous() + 1,)


@pytest.mark.parametrize("shape", [(256, 192), (64, 48)], ids=str)
def test_rows_of_a_transposed_matrix_are_one_kernel_that_reads_it_in_tiles(shape: tuple[int, int]) -> None:
    (kernel,) = _kernels(_across, torch.zeros(shape))
    assert kernel.mapping.tile in kernel.nest.rows
    assert not _stores_one_by_one(kernel)


def test_a_large_result_across_rows_too_long_for_tiles_is_stored_by_a_kernel_of_its_own() -> None:
    kernels = _kernels(_across, torch.zeros(1 << 13, 64))
    assert not kernels[-1].nest.columns
    assert kernels[-1].mapping.tile is not None
    assert not any(map(_stores_one_by_one, kernels))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.softmax(1),),
        lambda x: (x.softmax(0),),
        lambda x: (x - x.mean(0), x.amax(0)),
        lambda x: ((x - x.mean(1, keepdim=True)) * 2, x.sum(1)),
    ],
    ids=["rows", "columns", "means of columns", "means of rows"],
)
def test_results_along_the_rows_stay_with_them(function: Function) -> None:
    assert len(_kernels(function, torch.zeros(256, 192))) == 1


@settings(deadline=None, max_examples=10)
@given(st.integers(100, 220), st.integers(100, 220), st.sampled_from([0, 1]), st.booleans(), st.booleans())
def test_any_layout_of_source_and_result_gives_the_values_of_eager(
    rows: int, columns: int, dim: int, transposed: bool, transposed_back: bool
) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.t() if transposed else x
        z = (y - y.amax(dim, keepdim=True)) / (y.square().sum(dim, keepdim=True) + 1)
        return (z.t().contiguous() if transposed_back else z.contiguous()), z.sum(dim)

    check({"normalized": function}, [torch.randn(rows, columns, dtype=torch.float64)], slack=8)


@pytest.mark.parametrize(
    ("height", "width"), [(56, 56), (28, 28), (14, 14), (7, 20), (1, 24), (16, 16), (5, 17), (30, 40)]
)
def test_sums_of_channels_last_images_are_stored_in_tiles_without_a_rest(height: int, width: int) -> None:
    def contiguous_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x + y.float() * 0.5).contiguous(),)

    x, y = (torch.randn(2, 32, height, width).contiguous(memory_format=torch.channels_last) for _ in range(2))
    y = (y * 10).to(torch.uint8)
    (kernel,) = _kernels(contiguous_sum, x, y)
    assert not _stores_one_by_one(kernel)
    assert kernel.mapping.tile is not None
    assert kernel.nest.lane is not None
    assert kernel.nest.lane.extent % 16 == 0 or (height * width) % 16 != 0
    check({"sum": contiguous_sum}, [x, y], exact=True)


@pytest.mark.parametrize(
    "function",
    [lambda x: x[:, ::2].sum(0), lambda x: x[:, ::7].sum(0), lambda x: x[:, ::12].amax(0), lambda x: x.flip(1).sum(0)],
    ids=["every second", "every seventh", "every twelfth", "reversed"],
)
def test_columns_of_any_stride_are_reduced_along_the_rows_of_memory(function: Function) -> None:
    (kernel,) = _kernels(lambda x: (function(x),), torch.zeros(200, 2400))
    assert kernel.nest.lane in kernel.nest.rows


@pytest.mark.parametrize("width", [2400, 2001])
def test_softmax_over_columns_of_memory_with_gaps_is_one_kernel(width: int) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x[:, :2000:2].softmax(0),)

    (kernel,) = _kernels(function, torch.zeros(200, width))
    assert not _stores_one_by_one(kernel)
    check({"softmax": function}, [torch.randn(200, width)], slack=8)


def test_guards_do_not_change_the_order_in_which_images_are_written() -> None:
    x = torch.randn(8, 5, 300, 4).permute(0, 3, 1, 2)
    (kernel,) = _kernels(lambda x: (torch.nn.functional.pad(x, (3, 3, 3, 3)),), x)
    assert kernel.nest.rows[0].extent == 8
