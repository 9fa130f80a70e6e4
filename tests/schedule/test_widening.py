"""Conversions of half-precision values that a reduction reads again and again: once for each element, or on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lowering.against_eager import compiled
from tests.schedule.test_fusion import plan_of
from torchkiln.ir import expr as ex
from torchkiln.schedule.plan import Launch

DTYPES = (torch.bfloat16, torch.float16)


def _distances(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return ((x[:, None, :] - y[None, :, :]).square().sum(-1),)


def _converting_reductions(function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> int:
    """Kernels with a loop of a reduction that reads half-precision memory."""
    found = 0
    for step in plan_of(function, *given).steps:
        if isinstance(step, Launch) and step.kernel.nest.columns:
            inside = [s.value for phase in step.kernel.nest.phases for s in phase.inside]
            found += any(load.dtype in DTYPES for value in inside for load in ex.loads(value))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_for_every_pair_is_converted_once(dtype: torch.dtype) -> None:
    x, y = torch.randn(200, 64).to(dtype), torch.randn(64, 300).to(dtype).t()
    assert _converting_reductions(_distances, x, y) == 0
    (mine,) = compiled(_distances, (x, y))(x, y)
    torch.testing.assert_close(mine.double(), _distances(x.double(), y.double())[0], rtol=0.01, atol=0.01)


def test_a_part_of_something_larger_is_converted_without_the_rest() -> None:
    x, y = torch.randn(200, 100).bfloat16()[:, 3:67], torch.randn(300, 64).bfloat16()
    assert _converting_reductions(_distances, x, y) == 0
    (mine,) = compiled(_distances, (x, y))(x, y)
    torch.testing.assert_close(mine.double(), _distances(x.double(), y.double())[0], rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (_distances, ((20, 64), (30, 64))),  # little work
        (lambda x, y: ((x * y).sum(-1),), ((4096, 512), (512,))),  # the time is that of reading the other
        (lambda x, y: ((x[:, None] + y).amax(-1),), ((64,), (64, 512))),  # eight times is not often
    ],
    ids=["small", "memory", "few times"],
)
def test_other_conversions_are_left_where_they_are(
    function: Callable[..., tuple[Tensor, ...]], shapes: tuple[tuple[int, ...], ...]
) -> None:
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    assert _converting_reductions(function, *given) == 1


def test_a_tensor_that_changes_is_read_as_it_is_at_that_time() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        before = _distances(x, y)[0]
        x.mul_(2)
        return before, _distances(x, y)[0]

    x, y = torch.randn(200, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    expected = function(x.double(), y.double())
    for mine, exact in zip(compiled(function, (x, y))(x.clone(), y), expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=0.01, atol=0.01)
