"""Which half-precision values are rounded for their readers, and that nobody can tell where they are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lowering.against_eager import compiled
from tests.schedule.test_fusion import plan_of
from torchkiln.ir import expr as ex
from torchkiln.schedule.plan import Launch

X, Y = torch.randn(256, 1, 64).bfloat16(), torch.randn(1, 512, 64).bfloat16()


def _rounds_on_the_way(function: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> bool:
    """Whether some kernel rounds a value to bfloat16 and goes on with it."""
    for step in plan_of(function, *given).steps:
        if not isinstance(step, Launch):
            continue
        values = tuple(s.value for s in step.kernel.nest.statements)
        for node in ex.walk(values):
            if any(o.dtype == torch.bfloat16 and isinstance(o, ex.Op) for o in node.operands):
                return True
    return False


def test_a_value_that_is_only_summed_is_not_rounded() -> None:
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        moved = (x - y) * 3.7
        return moved.sum(0), (-moved).sum(1), (moved * y + x).sum()

    assert not _rounds_on_the_way(sums, X, Y)
    for mine, eagers in zip(compiled(sums, (X, Y))(X, Y), sums(X.double(), Y.double()), strict=True):
        assert (mine.double() - eagers).norm() < 0.01 * eagers.norm()


@pytest.mark.parametrize(
    "reader",
    [
        lambda v: (v == v.amax(1, keepdim=True)).sum(1),
        lambda v: (v - v.amin()).clamp(min=0.5).sum(0),
        lambda v: (v * v).sum(0),
        lambda v: v.sin().sum(0),
    ],
    ids=["equal", "maximum", "square", "function"],
)
def test_a_value_that_is_read_in_another_way_is(reader: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        moved = (x - y) * 3.7
        return moved.sum(0), reader(moved)

    assert _rounds_on_the_way(function, X, Y)


def test_the_largest_of_rounded_values_is_one_of_them() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        moved = (x - y) * 3.7
        return moved.sum(0), (moved == moved.amax(1, keepdim=True)).any(1)

    assert compiled(function, (X, Y))(X, Y)[1].all()
