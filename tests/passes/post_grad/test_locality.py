"""Nodes move next to their readers where that frees memory, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.higher_order.against_eager import check
from tests.passes.post_grad.functional_graphs import apply, calls, same_numbers, traced
from torchkiln import config
from torchkiln.lowering import lower
from torchkiln.passes.post_grad.locality import move_to_readers
from torchkiln.schedule import schedule
from torchkiln.target import capture_target

aten = torch.ops.aten
X = torch.randn(8, 8)


def _made_early(x: Tensor) -> Tensor:
    early = aten.sin.default(x)
    a = aten.mm.default(x, x)
    b = aten.mm.default(a, a)
    return aten.mm.default(b, early)


def _large_from_small(x: Tensor) -> Tensor:
    row = aten.sum.dim_IntList(x, [0])
    large = aten.expand.default(row, [8, 8]).sin()
    a = aten.mm.default(x, x)
    return aten.mm.default(a, large)


def test_made_when_it_is_read() -> None:
    gm = traced(_made_early, X)
    assert apply(move_to_readers, gm)
    assert calls(gm) == [
        "mm = mm.default(x_1, x_1)",
        "mm_1 = mm.default(mm, mm)",
        "sin = sin.default(x_1)",
        "mm_2 = mm.default(mm_1, sin)",
    ]
    same_numbers(gm, _made_early, X)


def test_what_is_made_of_less_waits_as_less() -> None:
    gm = traced(_large_from_small, X)
    assert apply(move_to_readers, gm)
    assert [call.split(" ")[0] for call in calls(gm)] == ["mm", "sum_1", "expand", "sin", "mm_1"]
    same_numbers(gm, _large_from_small, X)


def _small_from_large(x: Tensor) -> Tensor:
    small = aten.sum.dim_IntList(aten.mm.default(x, x), [0])  # moved, the matmul would stay live instead
    a = aten.mm.default(x, x.t())
    b = aten.mm.default(a, a)
    return aten.mul.Tensor(b, small)


def _draws(x: Tensor) -> Tensor:
    noise = aten.rand_like.default(x)
    more = aten.rand_like.default(x)
    return aten.sub.Tensor(aten.mul.Tensor(more, 2), noise)


def _reads_what_is_written(x: Tensor) -> Tensor:
    before = aten.sin.default(x)
    aten.copy_.default(x, aten.mm.default(x, x))
    return aten.mm.default(aten.neg.default(before), before)


@pytest.mark.parametrize(
    ("function", "in_this_order"),
    [
        (_small_from_large, ["sum_1", "mm_1"]),
        (_draws, ["rand_like", "rand_like_1"]),
        (_reads_what_is_written, ["sin", "mm", "copy_"]),
    ],
)
def test_left_as_it_is(function: Callable[..., Any], in_this_order: list[str]) -> None:
    gm = traced(function, X)
    apply(move_to_readers, gm)
    names = [node.name for node in gm.graph.nodes]
    assert [name for name in names if name in in_this_order] == in_this_order


def _made_too_early(x: Tensor, w: Tensor) -> Tensor:
    early = [torch.mm(x, w) * 2 for _ in range(6)]
    total = x
    for value in early:
        total = torch.mm(torch.mm(total, w), value)
    return total


def test_less_memory_at_the_peak() -> None:
    settings = config.resolve()
    peaks = []
    for run in (lambda gm: False, move_to_readers):
        gm = traced(_made_too_early, X, X)
        run(gm)
        target = capture_target(settings)
        peaks.append(schedule(lower(gm, settings, target), settings, target).peak_bytes)
    assert peaks[1] <= peaks[0] / 2


def test_as_eager() -> None:
    check(_made_too_early, X / 8, X / 8)
