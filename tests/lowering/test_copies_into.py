"""``copy_``: of numbers, of tensors of other dtypes, into dtypes that no loop of ours computes with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("everything_compiled")


def _check(
    compile_strictly: Callable[..., Any], fn: Callable[..., Any], targets: list[torch.Tensor], *rest: Any
) -> None:
    """The results and what was written, against eager."""
    others = [target.clone() for target in targets]
    torch.testing.assert_close(compile_strictly(fn)(others, *rest), fn(targets, *rest))
    for found, expected in zip(others, targets, strict=True):
        torch.testing.assert_close(found.view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_a_number_is_copied_everywhere(compile_strictly: Callable[..., Any], dtype: torch.dtype) -> None:
    def fn(targets: list[torch.Tensor], numbers: list[torch.Tensor]) -> list[torch.Tensor]:
        for x, number in zip(targets, (2, -2.75, True, *(n.item() for n in numbers)), strict=True):
            x[1:, ::2].copy_(number)
        return [x + 1 for x in targets]

    targets = [torch.arange(12).view(3, 4).to(dtype) for _ in range(5)]
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        _check(compile_strictly, fn, targets, [torch.tensor(-5), torch.tensor(-5.25)])


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.float32, torch.int32),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
        (torch.complex64, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float32, torch.float8_e5m2),
        (torch.uint16, torch.int64),
    ],
    ids=str,
)
def test_a_tensor_of_another_dtype_is_copied_and_expanded(
    compile_strictly: Callable[..., Any], target: torch.dtype, source: torch.dtype
) -> None:
    def fn(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.copy_(y).to(torch.complex64) * 2 for x, y in zip(targets, sources, strict=True)]

    sources = [torch.arange(12.0)[:count].view(shape) for count, shape in ((12, (3, 4)), (4, (4,)), (1, ()))]
    targets = [torch.ones(3, 4).to(target) for _ in sources]
    _check(compile_strictly, fn, targets, [numbers.to(source) for numbers in sources])
