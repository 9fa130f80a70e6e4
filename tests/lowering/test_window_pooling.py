"""Pooling over windows that may overlap: loops with eager's values, places and gradients, or eager's operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchkiln
from tests.lowering.against_eager import FLOATS, REDUCTION_SLACK, check, specimen

Layout = Callable[[torch.Tensor], torch.Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "permuted": lambda x: x.movedim(1, -2).contiguous().movedim(-2, 1),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
# Windows, steps, padding and the sizes of images.
GEOMETRIES = {
    "overlapping": (3, 2, 1, (2, 3, 8, 12)),
    "odd sizes": (3, 2, 1, (2, 3, 7, 9)),
    "side by side": (2, 2, 0, (2, 3, 8, 6)),
    "at every place": (3, 1, 1, (1, 2, 5, 6)),
    "with gaps": (2, 3, 0, (1, 2, 8, 9)),
    "far apart": ((1, 2), (5, 4), 0, (1, 2, 3, 9)),
    "of two lengths": ((2, 5), (1, 2), (1, 2), (2, 2, 6, 10)),
    "of one image": (3, 2, 1, (3, 8, 8)),
    "one pixel": (3, 2, 1, (2, 3, 1, 1)),
    "no image": (3, 2, 1, (0, 3, 8, 8)),
}


# Those that are pooled in all layouts; others in the first two, which have loops of different shapes.
_IN_ALL = ("overlapping", "odd sizes")


def _geometries() -> list[tuple[str, str, Any]]:
    """A name, a layout and a geometry."""
    return [
        (f"{name}, {layout}", layout, geometry)
        for (name, geometry), layout in itertools.product(GEOMETRIES.items(), LAYOUTS)
        if layout == "contiguous" or (len(geometry[3]) == 4 and (layout == "channels last" or name in _IN_ALL))
    ]


def _max_pools(kernel: Any, step: Any, padding: Any, *, places: bool = False) -> dict[str, Callable[..., Any]]:
    return {
        f"ceil mode {ceil}": partial(
            F.max_pool2d, kernel_size=kernel, stride=step, padding=padding, ceil_mode=ceil, return_indices=places
        )
        for ceil in (False, True)
    }


def _averages(kernel: Any, step: Any, padding: Any) -> dict[str, Callable[..., torch.Tensor]]:
    return {
        name: partial(F.avg_pool2d, kernel_size=kernel, stride=step, padding=padding, **options)
        for name, options in AVERAGES.items()
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_of_a_window_has_the_bits_of_eager(dtype: torch.dtype) -> None:
    for _, layout, (*windows, shape) in _geometries():
        check(_max_pools(*windows), [LAYOUTS[layout](specimen(dtype, shape))], exact=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_places_of_the_largest_are_those_of_eager(dtype: torch.dtype) -> None:
    for _, layout, (*windows, shape) in _geometries():
        if layout != "channels last" and shape[-1] > 1:
            check(_max_pools(*windows, places=True), [LAYOUTS[layout](specimen(dtype, shape))], exact=True)


def test_the_first_of_equal_elements_and_the_last_nan_are_taken() -> None:
    nan, inf = torch.nan, torch.inf
    rows = [
        [0.0, -0.0, 0.0, -0.0],
        [-0.0, 0.0, -0.0, 0.0],
        [nan, 1.0, nan, 2.0],
        [1.0, nan, inf, 3.0],
        [-inf, -inf, -inf, -inf],
        [inf, nan, inf, inf],
        [1e-42, -1e-42, 0.0, 2e-42],
    ]
    x = torch.tensor(rows).view(1, len(rows), 1, 4)
    pools = {
        f"{kernel} by {step}, {padding}": lambda x, given=(kernel, step, padding): F.max_pool2d(
            x, (1, given[0]), (1, given[1]), (0, given[2]), return_indices=True
        )
        for kernel, step, padding in ((4, 1, 0), (2, 1, 1), (3, 2, 1), (2, 2, 0), (3, 1, 1))
    }
    check(pools, [x], exact=True)


def test_dilated_windows_and_volumes() -> None:
    images, volumes = specimen(torch.float32, (2, 3, 11, 13)), specimen(torch.float32, (1, 2, 5, 6, 8))
    pools = {
        "dilated": lambda x, _: F.max_pool2d(x, 3, 2, 1, dilation=2, return_indices=True),
        "dilated in one dimension": lambda x, _: F.max_pool2d(x, (3, 2), 1, 1, dilation=(3, 1), return_indices=True),
        "largest": lambda _, x: F.max_pool3d(x, 3, 2, 1, return_indices=True),
        "largest, in ceil mode": lambda _, x: F.max_pool3d(x, (1, 2, 3), (1, 2, 2), ceil_mode=True),
    }
    check(pools, [images, volumes], exact=True)
    tame = specimen(torch.float32, (1, 2, 5, 6, 8), tame=True)
    averages = {
        "average": lambda x: F.avg_pool3d(x, 3, 2, 1),
        "average of what is there": lambda x: F.avg_pool3d(x, (1, 2, 3), 2, (0, 1, 1), True, False),
    }
    check(averages, [tame], slack=REDUCTION_SLACK)


def test_lines_are_pooled_by_loops() -> None:
    x = specimen(torch.float32, (2, 3, 17), tame=True)
    pools = {"largest": lambda x: F.max_pool1d(x, 3, 2, 1), "average": lambda x: F.avg_pool1d(x, 3, 2, 1)}
    check(pools, [x], slack=REDUCTION_SLACK)


AVERAGES: dict[str, dict[str, Any]] = {
    "padding counts": {},
    "padding does not count": {"count_include_pad": False},
    "ceil mode": {"ceil_mode": True},
    "ceil mode, padding does not count": {"ceil_mode": True, "count_include_pad": False},
    "divisor": {"divisor_override": 7},
    "negative divisor": {"divisor_override": -2, "ceil_mode": True},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_averages_are_those_of_eager(dtype: torch.dtype) -> None:
    for _, layout, (*windows, shape) in _geometries():
        check(_averages(*windows), [LAYOUTS[layout](specimen(dtype, shape, tame=True))], slack=REDUCTION_SLACK)


def test_awkward_numbers_stay_in_their_windows() -> None:
    x = specimen(torch.float32, (2, 3, 8, 12))
    check({"average": lambda x: F.avg_pool2d(x, 3, 2, 1)}, [x], slack=REDUCTION_SLACK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_averages_and_their_strides_are_those_of_eager(dtype: torch.dtype) -> None:
    for name, layout, (*windows, shape) in _geometries():
        x = LAYOUTS[layout](specimen(dtype, shape, tame=True))
        pools = list(_averages(*windows).values())
        given = [_weights(pool(x), tame=True) for pool in pools]
        got, like = (_gradients(run, x, given) for run in (_compiled(pools), _together(pools)))
        exact = _gradients(_together(pools), x.double(), [g.double() for g in given])
        for options, mine, its, precise in zip(AVERAGES, got, like, exact, strict=True):
            torch.testing.assert_close(mine, precise.to(dtype), msg=lambda m, at=(name, options): f"{at}: {m}")
            assert mine.stride() == its.stride(), (name, options)


def test_gradients_of_averages_overflow_and_are_nan_where_those_of_eager_are() -> None:
    for lay_out in LAYOUTS.values():
        x = lay_out(specimen(torch.float32, (2, 3, 8, 12), tame=True))
        pools = [lambda x: F.avg_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)]
        given = [_weights(pool(x), tame=False) for pool in pools]
        given[0][0] = given[1][0] = 3e38  # of which four have no sum
        for mine, its in zip(
            _gradients(_compiled(pools), x, given), _gradients(_together(pools), x, given), strict=True
        ):
            torch.testing.assert_close(mine, its, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_the_largest_are_those_of_eager(layout: str) -> None:
    x = LAYOUTS[layout](specimen(torch.float32, (2, 3, 8, 12), tame=True))
    pools = [lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 2)]
    given = [_weights(pool(x), tame=True) for pool in pools]
    for mine, its in zip(_gradients(_compiled(pools), x, given), _gradients(_together(pools), x, given), strict=True):
        torch.testing.assert_close(mine, its)
        assert mine.stride() == its.stride()


def test_what_is_before_and_after_a_pool_is_computed_with_it() -> None:
    x = specimen(torch.float32, (2, 3, 8, 12))
    before = torchkiln.stats().launches
    check({"pooled": lambda x: F.max_pool2d(torch.relu(x), 3, 2, 1) * 2}, [x], exact=True)
    assert torchkiln.stats().launches - before == 1


def test_other_windows_are_the_operators_of_eager() -> None:
    x = specimen(torch.float32, (1, 2, 16, 16), tame=True)
    last = x.contiguous(memory_format=torch.channels_last)
    integers = torch.arange(64).view(1, 1, 8, 8)
    largest, average = "aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default"
    for function, given, called in (
        (lambda x: F.max_pool2d(x, 7, 2, 3), x, largest),
        (lambda x: F.avg_pool2d(x, 7, 2, 3), x, average),
        (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), last, largest),
        (lambda x: F.max_pool2d(x, 2), integers, largest),
        (lambda x: F.avg_pool2d(x, 2), integers, average),
    ):
        before = torchkiln.stats().extern_calls.get(called, 0)
        check({"pooled": function}, [given], exact=True, extern=[called])
        assert torchkiln.stats().extern_calls[called] == before + 1


def test_symbolic_sizes_are_the_operators_of_eager() -> None:
    torch.compiler.reset()
    options: Any = {"fallback": False}

    def pools(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.avg_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1)

    run = torch.compile(pools, backend="kiln", dynamic=True, fullgraph=True, options=options)
    for size in (14, 17, 21):
        x = specimen(torch.float32, (2, 3, size, size), tame=True)
        torch.testing.assert_close(run(x), pools(x))
    assert "aten.avg_pool2d.default" in torchkiln.stats().extern_calls


def _weights(pooled: torch.Tensor, *, tame: bool) -> torch.Tensor:
    """Gradients of a result, laid out as it is."""
    return torch.empty_like(pooled).copy_(specimen(pooled.dtype, pooled.shape, seed=1, tame=tame))


def _together(pools: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    return lambda x: [pool(x) for pool in pools]


def _compiled(pools: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    torch.compiler.reset()
    options: Any = {"fallback": False, "adaptive": False}
    return torch.compile(_together(pools), backend="kiln", fullgraph=True, dynamic=False, options=options)


def _gradients(
    function: Callable[[torch.Tensor], list[torch.Tensor]], x: torch.Tensor, given: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradient of the input by each result alone."""
    leaf = x.detach().requires_grad_()
    results = function(leaf)
    return [
        torch.autograd.grad(result, leaf, weight, retain_graph=True)[0]
        for result, weight in zip(results, given, strict=True)
    ]
