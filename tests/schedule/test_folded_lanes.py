"""Short runs share vectors with the rows beside them, and reductions fold each run: values are those of eager."""

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
from torchkiln.schedule.plan import Launch

Function = Callable[..., Any]

# Of ``x`` with pixels, groups and the channels of a group in its last three dimensions, and ``y`` with one group.
EXACT: dict[str, Function] = {
    "largest": lambda x: x.amax((1, 3)),
    "least": lambda x: x.amin((1, 3)),
    "any": lambda x: torch.any(x != 0, (1, 3)),
    "beside the largest": lambda x: x == x.amax((1, 3), keepdim=True),
}
ROUNDED: dict[str, Function] = {
    "summed": lambda x: x.sum((1, 3)),
    "centred": lambda x: x - x.mean((1, 3), keepdim=True),
    "spread": lambda x: (x - x.mean((1, 3), keepdim=True)).square().sum((1, 3)),
}


def _pixels(dtype: torch.dtype, pixels: int, groups: int, channels: int, *, tame: bool = False) -> torch.Tensor:
    return specimen(dtype, (8, pixels, groups, channels), tame=tame)


def _nests(function: Function, *inputs: torch.Tensor) -> list[str]:
    plan = plan_of(lambda *given: (function(*given),), *inputs)
    return [str(step.kernel) for step in plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize(("groups", "lanes"), [(8, 64), (6, 16), (24, 64)])
def test_groups_beside_each_other_fill_the_lanes(groups: int, lanes: int) -> None:
    (kernel,) = _nests(ROUNDED["centred"], _pixels(torch.float32, 50, groups, 8))
    assert "folded by 8" in kernel
    assert f"cpu lanes {lanes} " in kernel


def test_groups_of_whole_cache_lines_stay_apart() -> None:
    (kernel,) = _nests(ROUNDED["centred"], _pixels(torch.float32, 50, 8, 16))
    assert "folded" not in kernel


def test_few_groups_stay_apart_for_threads() -> None:
    (kernel,) = _nests(ROUNDED["centred"], _pixels(torch.float32, 50, 8, 8)[:1])
    assert "folded" not in kernel


@pytest.mark.parametrize("bits", [256, 512])
def test_runs_longer_than_what_vectors_of_crowded_loops_hold_stay_apart(bits: int) -> None:
    def largest(x: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        for row in rows:
            x = x ^ row
        return x.amax((1, 3))

    rows = [specimen(torch.int8, (8, 1, 8, 1), seed) for seed in range(20)]
    check({"largest": largest}, [_pixels(torch.int8, 30, 8, bits // 16), *rows], exact=True, vector_bits=bits)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(DTYPES),
    st.integers(2, 40),
    st.integers(1, 12),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([128, 256, 512]),
)
def test_extrema_of_groups_are_those_of_eager(
    dtype: torch.dtype, pixels: int, groups: int, channels: int, bits: int
) -> None:
    x = _pixels(dtype, pixels, groups, channels)
    check(EXACT, [x], exact=True, vector_bits=bits)


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(FLOATS),
    st.integers(2, 100),
    st.integers(1, 12),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([128, 256, 512]),
)
def test_sums_of_groups_are_close_to_eager(
    dtype: torch.dtype, pixels: int, groups: int, channels: int, bits: int
) -> None:
    x = _pixels(dtype, pixels, groups, channels, tame=True)
    check(ROUNDED, [x], slack=REDUCTION_SLACK, vector_bits=bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_group_norms_and_their_statistics_are_close_to_eager(dtype: torch.dtype) -> None:
    x = specimen(dtype, (8, 6, 5, 32), tame=True).movedim(-1, 1)
    weight, bias = (specimen(dtype, (32,), k, tame=True) for k in (1, 2))
    functions: dict[str, Function] = {
        str(n): lambda x, w, b, n=n: torch.ops.aten.native_group_norm(x, w, b, 8, 32, 30, n, 1e-5) for n in (2, 4, 8)
    }
    check(functions, [x, weight, bias], slack=REDUCTION_SLACK)


def test_sums_of_equal_terms_keep_their_digits() -> None:
    x = torch.full((8, 100_000, 2, 4), 0.1)
    torch.compiler.reset()
    options: Any = {"fallback": False}
    found = torch.compile(lambda x: x.sum((1, 3)), backend="kiln", fullgraph=True, options=options)(x)
    exact = x.double().sum((1, 3))
    assert ((found.double() - exact).abs() / exact).max() < 1e-6


def test_layer_norm_of_pixels_stays_as_it_is() -> None:
    x = torch.randn(8, 50, 8)
    (kernel,) = _nests(lambda x: F.layer_norm(x, (8,)), x)
    assert "folded" not in kernel
