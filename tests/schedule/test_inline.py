"""Inlining: which values get memory, and that computing them again where they are read keeps the results."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lowering.against_eager import compiled
from tests.schedule.test_fusion import plan_of
from torchkiln.schedule.limits import CPU, LIMITS

Tensors = tuple[torch.Tensor, ...]


def _distances(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> Tensors:
    moved = g[:, :, None] * (x[:, None, :] - y[None, :, :])
    return moved.sum(1), moved.sum(0)


def test_a_large_value_of_small_ones_is_not_stored() -> None:
    plan = plan_of(_distances, torch.zeros(128, 64), torch.zeros(96, 64), torch.zeros(128, 96))
    assert plan.arena_bytes == 0


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: (lambda v: (v.sum(1), v.sum(0)))(x[:, None] * y + y.cos()), ((256,), (256,))),  # fits a cache
        (lambda x, y: (lambda v: (v.sum(1), v.sum(0)))(x * y + x), ((1024, 512), (1024, 512))),  # no smaller sources
        (lambda x, y: (lambda v: (v.sum(1), v.sum(0)))((x[:, None] - y).sin().exp().tan()), ((1024,), (512,))),  # dear
    ],
    ids=["small", "as large as its sources", "dear"],
)
def test_other_values_are_computed_once(function: object, shapes: tuple[tuple[int, ...], ...]) -> None:
    plan = plan_of(function, *(torch.zeros(shape) for shape in shapes))  # type: ignore[arg-type]
    assert plan.arena_bytes > 0


def test_a_product_with_something_small_is_computed_in_every_reader() -> None:
    def turned(x: torch.Tensor, w: torch.Tensor) -> Tensors:
        y = x * w
        return (torch.cat((-y[:, 32:], y[:, :32]), 1) + x,)

    plan = plan_of(turned, torch.zeros(512, 64), torch.zeros(64))
    assert (plan.arena_bytes, len(plan.steps)) == (0, 1)


def test_a_value_of_which_others_read_little_is_not_stored_for_them() -> None:
    def loss(x: torch.Tensor, classes: torch.Tensor) -> Tensors:
        logs = x.log_softmax(1)
        return logs.gather(1, classes).sum() + logs.sum(), x

    plan = plan_of(loss, torch.zeros(512, 1000), torch.zeros(512, 1, dtype=torch.int64))
    assert plan.arena_bytes < 512 * 1000


_SIZES = st.integers(1, 9)
_BODIES = st.sampled_from(
    [
        lambda a, b, c: a * b + c,
        lambda a, b, c: (a - b) / (c.abs() + 1),
        lambda a, b, c: torch.where(a > b, c, a),
        lambda a, b, c: (a - c).square() * b.relu(),
    ]
)
_READERS = [
    lambda v: v.sum(0),
    lambda v: v.sum(1),
    lambda v: v.amax(2),
    lambda v: (v * 2).sum((0, 2)),
    lambda v: v.transpose(0, 2) + 1,
    lambda v: -v.flip(1),
    lambda v: v.mean(),
    lambda v: v[0, :, -1:],
    lambda v: torch.cat((v[..., 1:], -v[..., :1]), 2),
]


@settings(deadline=None, max_examples=25)
@given(st.tuples(_SIZES, _SIZES, _SIZES), _BODIES, st.lists(st.sampled_from(_READERS), min_size=2, max_size=4))
def test_values_repeated_in_every_reader_are_those_of_eager(
    size: tuple[int, int, int], body: object, readers: list[object]
) -> None:
    i, j, k = size
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((i, 1, k), (j, k), (i, j, 1))]

    def function(*given: torch.Tensor) -> Tensors:
        value = body(*given)  # type: ignore[operator]
        return tuple(reader(value) for reader in readers)  # type: ignore[operator]

    with mock.patch.dict(LIMITS, cpu=replace(CPU, expanded_bytes=0)):
        results = compiled(function, inputs)(*inputs)
    torch.testing.assert_close(tuple(results), function(*inputs))
