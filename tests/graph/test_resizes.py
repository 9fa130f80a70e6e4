"""Resizes against eager: which elements are read, whatever the sizes and factors, and infinities among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from torchkiln.graph.resizes import resize_decompositions

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
LARGEST = {1: 300, 2: 70, 3: 12}
NEAREST = [(mode, rank) for mode in ("nearest", "nearest-exact") for rank in (1, 2, 3)]
LINEAR = [("linear", 1), ("bilinear", 2), ("trilinear", 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8]

Function = Callable[[torch.Tensor], torch.Tensor]


def resize(mode: str, **options: Any) -> Function:
    return lambda x: F.interpolate(x, mode=mode, **options)


def compiled(function: Function, **options: Any) -> Function:
    torch._dynamo.reset()
    settings = {"adaptive": False, "fallback": False}
    made: Function = torch.compile(function, backend="kiln", fullgraph=True, options=settings, **options)
    return made


def image(rank: int, *sizes: int, dtype: torch.dtype = torch.float32, channels: int = 5) -> torch.Tensor:
    """No two elements that lie near each other are equal."""
    count = 2 * channels * torch.Size(sizes[:rank]).numel()
    return torch.arange(count).mul(7).remainder(251).to(dtype).view(2, channels, *sizes[:rank])


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype is expected.dtype


def decomposed(mode: str, x: torch.Tensor, sizes: list[int], flags: list[bool], factors: list[Any]) -> torch.Tensor:
    rank = x.dim() - 2
    name = f"_upsample_nearest_exact{rank}d" if mode == "nearest-exact" else f"upsample_{mode}{rank}d"
    name = name.replace("1d1d", "1d")
    found: torch.Tensor = resize_decompositions()[getattr(torch.ops.aten, name).default](x, sizes, *flags, *factors)
    return found


@st.composite
def _resizes(draw: st.DrawFn, rank: int) -> tuple[list[int], list[float]]:
    """Sizes and a factor for each; often one whose result has the same or twice the size, though it is not 1 or 2."""
    sizes = draw(st.lists(st.integers(1, LARGEST[rank]), min_size=rank, max_size=rank))
    factors = [
        draw(
            st.one_of(
                st.floats(0.2, 3.5),
                st.integers(2, 35).map(lambda tenths: tenths / 10),
                st.floats(0, 0.99).map(lambda part, size=size: 1 + part / size),
                st.floats(0, 0.99).map(lambda part, size=size: 2 + part / size),
                st.sampled_from([0.5, 1.0, 2.0, 3.0]),
            ).filter(lambda factor, size=size: int(size * factor) > 0)
        )
        for size in sizes
    ]
    return sizes, factors


@given(data=st.data())
@hypothesis_settings(max_examples=300, deadline=None)
def test_the_elements_read_are_those_that_eager_reads(data: st.DataObject) -> None:
    mode, rank = data.draw(st.sampled_from(NEAREST))
    sizes, factors = data.draw(_resizes(rank))
    x = image(rank, *sizes, dtype=data.draw(st.sampled_from(DTYPES)), channels=data.draw(st.sampled_from([1, 3, 4, 5])))
    if rank > 1 and data.draw(st.booleans()):
        x = x.to(memory_format=FORMATS[rank])
    if data.draw(st.booleans()):
        expected = F.interpolate(x, mode=mode, scale_factor=factors)
        assert same(decomposed(mode, x, list(expected.shape[2:]), [], factors), expected)
    else:
        expected = F.interpolate(x, mode=mode, scale_factor=factors, recompute_scale_factor=True)
        assert same(decomposed(mode, x, list(expected.shape[2:]), [], [None] * rank), expected)


@given(data=st.data())
@hypothesis_settings(max_examples=200, deadline=None)
def test_sums_of_neighbours_are_eagers(data: st.DataObject) -> None:
    mode, rank = data.draw(st.sampled_from(LINEAR))
    sizes, factors = data.draw(_resizes(rank))
    x = image(rank, *sizes, dtype=torch.float64, channels=data.draw(st.sampled_from([1, 3, 5])))
    if rank > 1 and data.draw(st.booleans()):
        x = x.to(memory_format=FORMATS[rank])
    aligned = data.draw(st.booleans())
    expected = F.interpolate(x, mode=mode, scale_factor=factors, align_corners=aligned)
    found = decomposed(mode, x, list(expected.shape[2:]), [aligned], factors)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize(("mode", "rank"), NEAREST)
def test_compiled_resizes_by_a_factor_near_two_or_one_read_what_eager_reads(
    mode: str, rank: int, recompute: bool | None
) -> None:
    for factor in (2.3, 1.3, 3.3):
        function = resize(mode, scale_factor=factor, recompute_scale_factor=recompute)
        x = image(rank, 3, 3, 3)
        assert same(compiled(function)(x), function(x))


@pytest.mark.parametrize(("mode", "rank"), NEAREST)
def test_compiled_resizes_of_symbolic_sizes_read_what_eager_reads(mode: str, rank: int) -> None:
    def more(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.15, mode=mode)  # twice the size for up to six

    function = compiled(more, dynamic=True)
    for size in (5, 4, 6, 7, 60, 70):
        if size < 20 or rank < 3:
            x = image(rank, size, size, size)
            assert same(function(x), more(x)), size


def test_a_factor_that_reads_past_the_end_reads_the_last_element() -> None:
    def longer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.upsample_nearest1d(x, [25], 1.0)

    x = image(1, 10)
    assert same(compiled(longer)(x), longer(x))


INFINITE_CASES: list[dict[str, Any]] = [
    {"scale_factor": 2}, {"scale_factor": 1.7}, {"scale_factor": 0.6}, {"scale_factor": 1.05},
    {"size": 5}, {"size": (5, 10, 5)}, {"size": (5, 8, 5), "align_corners": True},
]  # fmt: skip


@pytest.mark.parametrize("options", INFINITE_CASES, ids=str)
@pytest.mark.parametrize(("mode", "rank"), [*LINEAR, ("bicubic", 2)])
def test_infinities_reach_what_they_reach_in_eager(mode: str, rank: int, options: dict[str, Any]) -> None:
    given = {name: value[:rank] if isinstance(value, tuple) else value for name, value in options.items()}
    function = resize(mode, **given)
    x = torch.randn(2, 3, *[5] * rank)
    x[0, 1, 2], x[0, 2, 4], x[1, 0, 0] = float("inf"), float("-inf"), float("inf")
    x.requires_grad_()
    found, expected = compiled(function)(x), function(x)
    torch.testing.assert_close(found, expected, equal_nan=True)
    tangent = torch.randn_like(expected)
    tangent.view(6, -1)[:, 3::11] = float("inf")
    (found,) = torch.autograd.grad(found, x, tangent)
    (expected,) = torch.autograd.grad(expected, x, tangent)
    torch.testing.assert_close(found, expected, equal_nan=True)


@given(data=st.data())
@hypothesis_settings(max_examples=25, deadline=None)
def test_gradients_for_factors_near_one_and_two_are_eagers(data: st.DataObject) -> None:
    mode, rank = data.draw(st.sampled_from([*NEAREST, *LINEAR, ("bicubic", 2)]))
    sizes, factors = data.draw(_resizes(rank))
    function = resize(mode, scale_factor=factors)
    x = image(rank, *sizes, channels=2).requires_grad_()
    expected = function(x)
    tangent = torch.randint_like(expected, -8, 9)
    (wanted,) = torch.autograd.grad(expected, x, tangent)
    (found,) = torch.autograd.grad(compiled(function)(x), x, tangent)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(("mode", "rank"), LINEAR)
@pytest.mark.parametrize("before", [1, 2, 3, 7, 10])
def test_weights_are_zero_where_those_of_eager_are(mode: str, rank: int, before: int) -> None:
    """An infinite element times zero is NaN, and times a weight of one rounding it is infinite."""
    sizes = (before, *[1] * (rank - 1))
    x = torch.where(torch.eye(before) == 1, math.inf, 1.0).view(before, 1, *sizes)
    for after in range(1, 40):
        to = [after, *sizes[1:]]
        found = decomposed(mode, x, to, [False], [None] * rank)
        torch.testing.assert_close(found, resize(mode, size=to)(x), rtol=0, atol=0, equal_nan=True)
