"""Matmuls by direct calls of BLAS: every layout it takes gives eager's numbers, and any other goes to the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchkiln.codegen.llvm import blas
from torchkiln.config import Settings
from torchkiln.ir.program import Buffer, ExternCall, StridedView
from torchkiln.native.blas import GEMM_ROUTINES, callable_routines
from torchkiln.target import capture_target

LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda r, c: torch.randn(r, c),
    "columns": lambda r, c: torch.randn(c, r).t(),
    "part of rows": lambda r, c: torch.randn(r, c + 3)[:, 2 : 2 + c],
    "part of columns": lambda r, c: torch.randn(c, r + 3)[:, 1 : 1 + r].t(),
    "every other element": lambda r, c: torch.randn(r, 2 * c)[:, ::2],
    "one row again and again": lambda r, c: torch.randn(1, c).expand(r, c),
}

pytestmark = pytest.mark.skipif(
    GEMM_ROUTINES[torch.float32] not in callable_routines(), reason="this torch has no BLAS that can be called"
)


def _both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A result with contiguous rows, and one that is read by a kernel."""
    return x @ y, torch.relu(y.t() @ x.t())


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("sizes", [(6, 4, 9), (1, 5, 1), (3, 1, 4), (1, 17, 8), (7, 5, 1)])
def test_every_layout(left: str, right: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    x, y = LAYOUTS[left](m, k), LAYOUTS[right](k, n)
    torch._dynamo.reset()
    results = torch.compile(_both, backend="kiln", options={"fallback": False})(x, y)
    for mine, eagers in zip(results, _both(x, y), strict=True):
        torch.testing.assert_close(mine, eagers)
        assert mine.stride() == eagers.stride()


@pytest.mark.parametrize("dtype", GEMM_ROUTINES)
def test_what_was_in_the_memory_of_the_result_does_not_matter(dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x, y: torch.sin(x @ y), backend="kiln", options={"fallback": False})
    for fill in (float("nan"), float("inf")):
        torch.full((64, 64), fill, dtype=dtype)  # freed memory that may be given out again
        x, y = torch.randn(64, 32, dtype=dtype), torch.randn(32, 64, dtype=dtype)
        torch.testing.assert_close(compiled(x, y), torch.sin(x @ y))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_spread_as_they_do_in_eager(value: float) -> None:
    x, y = torch.randn(5, 8), torch.randn(8, 6)
    x[2, 3] = value
    torch._dynamo.reset()
    mine = torch.compile(lambda x, y: x @ y, backend="kiln", options={"fallback": False})(x, y)
    torch.testing.assert_close(mine, x @ y, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_known_only_at_run_time(transposed: bool) -> None:
    """None of them at all, which is for the operator, as well as one and more."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y = y.t() if transposed else y
        return x @ y, torch.relu(x[1:] @ y)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    y = torch.randn(6, 6)
    for rows in (5, 9, 2, 1, 40):
        x = torch.randn(rows, 6)
        results, expected = compiled(x, y), function(x, y)
        torch.testing.assert_close(results, expected)
        assert [r.stride() for r in results] == [r.stride() for r in expected]


def _call(x: StridedView, y: StridedView) -> ExternCall:
    return ExternCall(torch.ops.aten.mm.default, (x, y), ("z",))


def _view(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.float32) -> StridedView:
    return StridedView("x", dtype, shape, strides)


def _buffer(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Buffer:
    return Buffer("z", dtype, shape, strides)


ROWS = _view((4, 4), (4, 1))


@pytest.mark.parametrize(
    ("x", "y", "result", "direct"),
    [
        (ROWS, ROWS, _buffer((4, 4), (4, 1)), True),
        (ROWS, ROWS, _buffer((4, 4), (1, 4)), True),
        (_view((4, 4), (9, 1)), _view((4, 4), (1, 6)), _buffer((4, 4), (4, 1)), True),
        (_view((4, 4), (0, 1)), ROWS, _buffer((4, 4), (4, 1)), False),
        (_view((4, 4), (8, 2)), ROWS, _buffer((4, 4), (4, 1)), False),
        (_view((4, 4), (2, 1)), ROWS, _buffer((4, 4), (4, 1)), False),  # rows that overlap
        (_view((4, 3), (3, 1)), ROWS, _buffer((4, 4), (4, 1)), False),  # for torch to refuse
        (_view((0, 4), (4, 1)), ROWS, _buffer((0, 4), (4, 1)), False),
        (_view((4, 0), (1, 1)), _view((0, 4), (4, 1)), _buffer((4, 4), (4, 1)), False),  # a sum of nothing
        (_view((4, 4), (2**31, 1)), ROWS, _buffer((4, 4), (4, 1)), False),
        (
            _view((4, 4), (4, 1), torch.bfloat16),
            _view((4, 4), (4, 1), torch.bfloat16),
            _buffer((4, 4), (4, 1), torch.bfloat16),
            False,
        ),
    ],
)
def test_which_products_are_called_directly(x: StridedView, y: StridedView, result: Buffer, direct: bool) -> None:
    assert blas.is_direct(_call(x, y), result, capture_target(Settings())) is direct


def test_products_that_the_user_allows_to_be_less_precise_are_left_to_torch() -> None:
    before = torch.get_float32_matmul_precision()
    call, result = _call(ROWS, ROWS), _buffer((4, 4), (4, 1))
    try:
        for precision, direct in (("medium", False), ("high", False), ("highest", True)):
            torch.set_float32_matmul_precision(precision)
            assert blas.is_direct(call, result, capture_target(Settings())) is direct
    finally:
        torch.set_float32_matmul_precision(before)
