"""Short loops share vectors with the loop around them: values are those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import DTYPES, FLOATS, REDUCTION_SLACK, check, specimen
from tests.schedule.test_fusion import plan_of
from torchkiln.schedule.kernel import CpuMapping, Kernel
from torchkiln.schedule.plan import Launch

Function = Callable[..., Any]

# Of ``x`` with ``length`` elements of a wider memory in each row, and ``y`` with one row of them.
MOVES: dict[str, Function] = {
    "copied": lambda x, y: x.clone(memory_format=torch.contiguous_format),
    "compared with a row": lambda x, y: x == y,
    "compared with a column": lambda x, y: x == x[:, :, :1],
    "beside their places": lambda x, y: torch.where(torch.arange(x.shape[1])[:, None] > 2, x, y),
    "padded": lambda x, y: F.pad(x, (0, 0, 1, 2)),
    "padded to both sides": lambda x, y: F.pad(x[:, :, 1:-1], (1, 1)),
    "reversed rows": lambda x, y: x.flip(1),
    "computed rows": lambda x, y: x[:, torch.arange(x.shape[1]) * 3 % x.shape[1]],
    "into wider rows": lambda x, y: torch.cat([x, y.expand_as(x)], -1),
}
REDUCTIONS: dict[str, Function] = {
    "summed": lambda x, y: (x + y).sum((1, 2)),
    "largest": lambda x, y: x.amax((1, 2)),
    "place of the largest": lambda x, y: x.flatten(1).argmax(1),
    "normalized": lambda x, y: F.layer_norm(x, x.shape[1:]) + y,
    "softmax of all": lambda x, y: x.exp().flatten(1).softmax(1).view(x.shape) * y,
}


def _kernels(function: Function, *inputs: torch.Tensor) -> list[Kernel]:
    plan = plan_of(lambda *given: (function(*given),), *inputs)
    return [step.kernel for step in plan.steps if isinstance(step, Launch)]


def _rows(dtype: torch.dtype, count: int, length: int, *, tame: bool = False) -> torch.Tensor:
    return specimen(dtype, (3, count, 2 * length), tame=tame)[:, :, :length]


@pytest.mark.parametrize(("name", "count"), [("padded", 45), ("summed", 48), ("largest", 48), ("normalized", 48)])
def test_short_rows_fill_the_lanes(name: str, count: int) -> None:
    x = _rows(torch.float32, count, 8)
    (kernel,) = _kernels({**MOVES, **REDUCTIONS}[name], x, x[0, 0])
    assert isinstance(kernel.mapping, CpuMapping)
    assert kernel.mapping.lanes > 8


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(DTYPES),
    st.integers(2, 40),
    st.sampled_from([2, 4, 8, 16, 32]),
    st.sampled_from([128, 256, 512]),
)
def test_moved_rows_have_the_values_of_eager(dtype: torch.dtype, count: int, length: int, bits: int) -> None:
    x = _rows(dtype, count, length)
    check(MOVES, [x, specimen(dtype, (length,), 1)], exact=True, vector_bits=bits)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(FLOATS),
    st.integers(2, 40),
    st.sampled_from([4, 8, 16, 32]),
    st.sampled_from([128, 256, 512]),
)
def test_reduced_rows_are_close_to_eager(dtype: torch.dtype, count: int, length: int, bits: int) -> None:
    x, y = _rows(dtype, count, length, tame=True), specimen(dtype, (length,), 1, tame=True)
    check(REDUCTIONS, [x, y], slack=REDUCTION_SLACK, vector_bits=bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_group_norms_with_channels_last_are_close_to_eager(dtype: torch.dtype) -> None:
    x = specimen(dtype, (2, 6, 5, 16), tame=True).movedim(-1, 1)
    functions: dict[str, Function] = {str(n): lambda x, n=n: F.group_norm(x, n) for n in (1, 2, 4, 8)}
    check(functions, [x], slack=REDUCTION_SLACK)


def test_sums_of_equal_terms_keep_their_digits() -> None:
    x = torch.full((2, 100_000, 16), 0.1)[:, :, :8]
    torch.compiler.reset()
    options: Any = {"fallback": False}
    found = torch.compile(lambda x: x.sum((1, 2)), backend="kiln", fullgraph=True, options=options)(x)
    exact = x.double().sum((1, 2))
    assert ((found.double() - exact).abs() / exact).max() < 1e-6
