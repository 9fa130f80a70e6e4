"""Adaptive average pooling: windows of one length are loops with eager's values; others are eager's operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchkiln
from tests.lowering.against_eager import FLOATS, REDUCTION_SLACK, check, specimen

Pooled = Callable[[torch.Tensor], torch.Tensor]

POOLS: dict[str, tuple[Pooled, tuple[int, ...]]] = {
    "1d": (lambda x: F.adaptive_avg_pool1d(x, 5), (2, 3, 20)),
    "2d": (lambda x: F.adaptive_avg_pool2d(x, (7, 3)), (2, 3, 14, 48)),
    "2d of one image": (lambda x: F.adaptive_avg_pool2d(x, 4), (3, 8, 12)),
    "2d as it is": (lambda x: F.adaptive_avg_pool2d(x, (6, 5)), (2, 3, 6, 5)),
    "3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 1, 4)), (2, 3, 4, 5, 8)),
    "3d of one image": (lambda x: F.adaptive_avg_pool3d(x, 2), (3, 4, 2, 6)),
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def _with_gradient(pool: Pooled) -> Callable[[torch.Tensor], Any]:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        pooled = pool(leaf)
        weights = torch.arange(1, pooled.numel() + 1, dtype=torch.float32).view(pooled.shape).to(pooled.dtype)
        return pooled, torch.autograd.grad(pooled, leaf, weights)[0]

    return both


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_windows_of_one_length_are_loops_with_the_values_of_eager(dtype: torch.dtype, layout: str) -> None:
    for pool, shape in POOLS.values():
        x = LAYOUTS[layout](specimen(dtype, shape, tame=True))
        check({"pooled": pool}, [x], slack=REDUCTION_SLACK)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_and_strides_are_those_of_eager(dtype: torch.dtype, layout: str) -> None:
    for name, (pool, shape) in POOLS.items():
        x = LAYOUTS[layout](specimen(dtype, shape, tame=True))
        torch.compiler.reset()
        options: Any = {"fallback": False}
        compiled = torch.compile(pool, backend="kiln", fullgraph=True, options=options)
        results = _with_gradient(compiled)(x), _with_gradient(pool)(x), _with_gradient(pool)(x.double())
        for got, like, exact in zip(*results, strict=True):  # eager's gradient of 3d rounds three times in bfloat16
            torch.testing.assert_close(got, exact.to(dtype), msg=name)
            assert got.stride() == like.stride(), name


def test_other_windows_are_the_operator_of_eager() -> None:
    x = specimen(torch.float32, (2, 3, 14, 15), tame=True)
    check({"pooled": lambda x: F.adaptive_avg_pool2d(x, (7, 4))}, [x], extern=["aten._adaptive_avg_pool2d.default"])


def test_symbolic_sizes_are_the_operator_of_eager() -> None:
    torch.compiler.reset()
    options: Any = {"fallback": False}
    run = torch.compile(
        lambda x: F.adaptive_avg_pool2d(x, 7), backend="kiln", dynamic=True, fullgraph=True, options=options
    )
    for size in (14, 16, 21):
        x = specimen(torch.float32, (2, 3, size, size), tame=True)
        torch.testing.assert_close(run(x), F.adaptive_avg_pool2d(x, 7))
    assert "aten._adaptive_avg_pool2d.default" in torchkiln.stats().extern_calls


def test_infinities_and_nan_stay_in_their_window() -> None:
    x = specimen(torch.float32, (1, 2, 8, 8), tame=True)
    x[0, 0, 1, 2], x[0, 1, 7, 7] = torch.inf, torch.nan
    check({"pooled": lambda x: F.adaptive_avg_pool2d(x, 4)}, [x], slack=REDUCTION_SLACK)
