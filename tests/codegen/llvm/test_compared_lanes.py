"""Comparisons of indices along the lanes: true from some lane on, or before it, or nowhere, or everywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.lowering.against_eager import check, specimen

COMPARISONS = (torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne)
WIDTHS = (5, 64, 200)


@pytest.mark.parametrize("bits", [256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_lanes_are_compared_as_in_eager(dtype: torch.dtype, bits: int) -> None:
    inputs = [specimen(dtype, (3, width)) for width in WIDTHS]

    def chosen(x: Tensor, up: bool, number: int) -> tuple[Tensor, ...]:
        count = x.shape[1]
        place = torch.arange(count) if up else torch.arange(count - 1, -1, -1)
        return tuple(torch.where(compare(place, number), x, 1) for compare in COMPARISONS)

    def of_all(*given: Tensor) -> tuple[Tensor, ...]:
        cases = [(up, number) for up in (True, False) for number in (-(2**40), -1, 0, 4, 64, 2**62)]
        return tuple(result for x in given for case in cases for result in chosen(x, *case))

    check({"compared": of_all}, inputs, exact=True, vector_bits=bits)


@pytest.mark.parametrize("diagonal", [-70, -1, 0, 3, 70])
def test_lanes_are_compared_with_rows_as_in_eager(diagonal: int) -> None:
    x = specimen(torch.float32, (66, 131))
    functions = {
        "tril": lambda x: x.tril(diagonal),
        "triu": lambda x: x.triu(diagonal),
        "flipped": lambda x: x.flip(1).tril(diagonal).flip(1),
    }
    check(functions, [x], exact=True, vector_bits=512)
