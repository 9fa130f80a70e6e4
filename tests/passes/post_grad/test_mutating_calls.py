"""Mutating operators write to memory of their own: what a pass made one stays two for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import torchkiln
from tests.higher_order.against_eager import check, compiled


@torch.library.custom_op("kiln_test_calls::mix_", mutates_args={"written", "one"})
def mix_(written: Sequence[Tensor], one: Tensor, read: Sequence[Tensor], scale: Tensor) -> None:
    """Each write shows in every other argument that has the same memory."""
    for k, value in enumerate((*written, one)):
        value.mul_(2).add_(k + 1)
        value.add_(scale.sum())
        for other in (*read, *written):
            value.add_(other.sum() / 8)


Make = Callable[[Tensor, list[Tensor]], Tensor]

# Ways to come by a value, equal to another one or in the same memory.
MAKE: list[Make] = [
    lambda x, made: x * 2,
    lambda x, made: x + 0,
    lambda x, made: x.sort().values,
    lambda x, made: torch.zeros(6),
    lambda x, made: made[-1].clone(),
    lambda x, made: made[0] * 1,
    lambda x, made: made[-1].flip(0).flip(0),
    lambda x, made: made[-1].view(2, 3).t().contiguous().t().reshape(6),
    lambda x, made: made[0].view(-1),
    lambda x, made: made[-1].detach(),
]
PART: list[Callable[[Tensor], Tensor]] = [
    lambda value: value,
    lambda value: value,
    lambda value: value[:4],
    lambda value: value[2:],
    lambda value: value.view(2, 3)[1],
    lambda value: value[::2],
    lambda value: value.clone(),
]


def _program(seed: int) -> Callable[[Tensor], list[Tensor]]:
    draw = random.Random(seed)
    recipe = [draw.choice(MAKE) for _ in range(3)]
    steps = [
        [(draw.randrange(4), draw.choice(PART)) for _ in range(draw.randrange(3) + draw.randrange(3) + 2)]
        for _ in range(2)
    ]
    split = [draw.randrange(len(step) - 1) for step in steps]
    on_input = draw.random() < 0.3

    def run(x: Tensor) -> list[Tensor]:
        made = [x if on_input else x * 2]
        for make in recipe:
            made.append(make(x, made))
        for step, cut in zip(steps, split, strict=True):
            given = [part(made[which]) for which, part in step]
            mix_(given[:cut], given[cut], given[cut + 1 : -1], given[-1])
        return [value + 0 for value in made]

    return run


@pytest.mark.parametrize("seed", range(30))
def test_arguments_share_memory_only_where_they_do_in_the_program(seed: int) -> None:
    check(_program(seed), torch.arange(6.0) - 2.5)


def test_equal_statistics_are_updated_apart_in_training() -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = x * 2, x * 2
        mix_([first], second, [first.clone()], second)
        return (weight * first).sin(), first, second

    check(function, torch.randn(5), torch.randn(5, requires_grad=True))


def test_an_argument_that_is_read_is_copied_only_where_it_is_also_written() -> None:
    def apart(x: Tensor) -> Tensor:
        y, z = x * 2, x * 3
        mix_([], y, [z], z)
        return y

    def equal(x: Tensor) -> Tensor:
        y = x * 2
        z = y.clone()
        mix_([], y, [z], z)
        return y

    launches = []
    for function in (apart, equal):
        torch._dynamo.reset()
        before = torchkiln.stats().launches
        compiled(function)(torch.randn(40))
        launches.append(torchkiln.stats().launches - before)
    assert launches == [1, 1]  # both values in one kernel
