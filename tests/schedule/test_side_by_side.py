"""Small kernels of a card that have nothing to do with each other are launched as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.codegen.llvm.gpu.on_threads import plan_for, run_on_threads
from tests.lowering.against_eager import capture
from torchkiln.config import Settings
from torchkiln.lowering import lower
from torchkiln.schedule import schedule
from torchkiln.schedule.plan import Launch
from torchkiln.target import capture_target


def _adamw(*arguments: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for k in range(0, len(arguments), 4):
        p, g, m, v = arguments[k : k + 4]
        m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
        found += [p * 0.9999 - 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8), m, v]
    return found


def _launches(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> int:
    return sum(isinstance(step, Launch) for step in plan_for(function, inputs).steps)


def _parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.rand(shape) + k for k, shape in enumerate(shapes) for _ in range(4)]


def test_steps_of_small_parameters_are_few_kernels() -> None:
    inputs = _parameters(*[(96,), (96, 4)] * 6)
    assert _launches(_adamw, inputs) == 4  # three parameters to a kernel, by their shape
    for got, wanted in zip(run_on_threads(_adamw, inputs), _adamw(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_large_ones_are_not() -> None:
    assert _launches(lambda x, y: (x + 1, y * 2), [torch.empty(1 << 19), torch.empty(1 << 19)]) == 2
    assert _launches(lambda x, y: (x + 1, y * 2), [torch.empty(1 << 10), torch.empty(1 << 10)]) == 1


def _in_a_row(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x.sum(0)
    return a, (a[:, None] @ a[None]).sum(0), y.sum(0)


@pytest.mark.parametrize(
    ("function", "shapes", "launches"),
    [
        (lambda x, y: (x.sum(0), y.sum(0)), [(16, 96), (16, 96)], 1),
        (lambda x, y: (x.sum(0), y.amax(0)), [(16, 96), (16, 96)], 2),  # not the same
        (lambda x, y: (x.sum(0), y.sum(1)), [(16, 96), (96, 16)], 2),  # another layout
        (lambda x, y: (x + 1, y.t() * 2), [(32, 48), (48, 32)], 2),  # stored along the other dimension
        (_in_a_row, [(16, 96), (16, 96)], 2),  # the last before the product
    ],
)  # fmt: skip
def test_what_runs_together_gives_the_values_of_eager(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], launches: int
) -> None:
    inputs = [torch.rand(shape) for shape in shapes]
    assert _launches(function, inputs) == launches
    for got, wanted in zip(run_on_threads(function, inputs, ["aten.mm.default"]), function(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)


def test_on_cpus_kernels_cost_nothing_to_start() -> None:
    settings, target = Settings(), capture_target(Settings())
    inputs = _parameters((96,), (96,))
    plan = schedule(lower(capture(_adamw, inputs), settings, target), settings, target)
    assert len(plan.steps) == 2
