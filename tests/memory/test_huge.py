"""More than 2³¹ elements: positions, offsets and counts that need 64 bits.

Large allocations are zeros never written to, which the system gives without memory behind them, and expanded tensors.
What walks over all of such a tensor takes seconds and runs with ``make huge``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

BEYOND = 2**31 + 11
ELEMENTS = 3_000_000_019

CompileStrictly = Callable[..., Any]


@pytest.fixture(scope="module")
def bytes_() -> Tensor:
    """3 × 10⁹ bytes, zero but for a few places."""
    x = torch.zeros(ELEMENTS, dtype=torch.uint8)
    for place in _PLACES:
        x[place] = place % 251 + 1
    x[-1000:] = torch.arange(1000) % 256
    return x


_PLACES = (0, 5, 2**31 - 1, 2**31, 2**31 + 7, 2**31 + 1_000_003, ELEMENTS - 1001)


def _check(compile_strictly: CompileStrictly, function: Callable[..., Any], *arguments: Any) -> None:
    got, wanted = compile_strictly(function)(*arguments), function(*arguments)
    for a, b in zip(got, wanted, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)


def test_slices_near_the_end(compile_strictly: CompileStrictly, bytes_: Tensor) -> None:
    def slices(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x[-1000:] + 1,
            x[2**31 - 3 : 2**31 + 20] * 2,
            x[:: 2**20 + 7] + 1,
            x[2**31 + 7 :: 1_000_003 - 7] ^ 3,
            x[-1000:].view(20, 50).t().contiguous(),
            x[-1000:].flip(0).sum(),
            x[-70:].float().cumsum(0),
        )

    _check(compile_strictly, slices, bytes_)


def test_columns_and_rows_of_a_matrix_with_large_strides(compile_strictly: CompileStrictly, bytes_: Tensor) -> None:
    def columns(x: Tensor) -> tuple[Tensor, ...]:
        tall = x[:3_000_000_000].view(60_000, 50_000)
        wide = x[:3_000_000_000].view(3, 1_000_000_000)
        return (
            tall[:, -1] + 1, tall[-3:, ::777].t() + 1, tall[::10_000, -90:] * 2, wide[:, -100:] + 1,
            wide[:, -100:].t().contiguous(), tall[:, 12_345].amax(), wide[:, -33:].sum(0),
        )  # fmt: skip

    _check(compile_strictly, columns, bytes_)


def test_positions_read_from_memory(compile_strictly: CompileStrictly, bytes_: Tensor) -> None:
    places = torch.tensor([*_PLACES, ELEMENTS - 1, -1, -ELEMENTS, -1001])

    def read(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        rows = x[:3_000_000_000].view(-1, 50)
        forward = i % ELEMENTS
        return (
            x[i], x.index_select(0, forward), x.gather(0, forward), x[i] + 1,
            rows[(forward // 50).clamp(max=59_999_999)] * 2, torch.nn.functional.embedding(forward[:4] // 50, rows),
        )  # fmt: skip

    _check(compile_strictly, read, bytes_, places)


@pytest.mark.parametrize("place", [ELEMENTS, 2**32 + 5, 2**40, -ELEMENTS - 1])
def test_positions_beyond_the_end_are_an_error(compile_strictly: CompileStrictly, bytes_: Tensor, place: int) -> None:
    """2³² + 5 is inside when cut to 32 bits."""
    compiled = compile_strictly(lambda x, i: x[i] + 1)
    assert int(compiled(bytes_, torch.tensor([5]))[0]) == 7
    with pytest.raises(IndexError):
        compiled(bytes_, torch.tensor([place]))


def test_elements_of_four_bytes_beyond_2_to_the_31_bytes(compile_strictly: CompileStrictly) -> None:
    x = torch.zeros(600_000_000, dtype=torch.float32)
    x[-500:] = torch.arange(500.0)

    def read(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        rows = x.view(-1, 100)
        return x[-500:] * 2, rows[-5:].t() + 1, x[i], x[:: 2**19 + 1] + 1, rows[:, 7][-9:], rows[-64:, ::3].sum(0)

    _check(compile_strictly, read, x, torch.tensor([599_999_999, 536_870_912, -3]))


def test_positions_as_values(compile_strictly: CompileStrictly) -> None:
    def positions(x: Tensor) -> tuple[Tensor, ...]:
        every = torch.arange(BEYOND)[:: 2**24 + 1]
        return every + x, (every % 7) * 2, every > 2**31, torch.arange(2**33, 2**33 + 40) - 2**33 + x[0]

    every = torch.arange(0, BEYOND, 2**24 + 1)  # eager would hold all 2³¹ of them
    got = compile_strictly(positions)(torch.tensor([3]))
    for a, b in zip(got, (every + 3, every % 7 * 2, every > 2**31, torch.arange(40) + 3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.huge
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int32], ids=str)
@pytest.mark.parametrize("count", [BEYOND, 2**32 + 3])
def test_reductions_over_expanded_tensors(compile_strictly: CompileStrictly, dtype: torch.dtype, count: int) -> None:
    def counts(x: Tensor) -> tuple[Tensor, ...]:
        wide = x.expand(count)
        return wide.sum(), (wide == 1).sum(), wide.any(), wide.all()

    total, ones, some, every = compile_strictly(counts)(torch.ones(1, dtype=dtype))
    assert (int(total), int(ones), bool(some), bool(every)) == (count, count, True, True)


@pytest.mark.huge
def test_reductions_of_rows_that_are_repeated(compile_strictly: CompileStrictly) -> None:
    rows = 2**31 // 1000 + 77

    def reduce(x: Tensor) -> tuple[Tensor, ...]:
        wide = x.expand(rows, 1000)
        return wide.sum(0), wide.sum(), wide.amax(), wide.amin(0), wide.reshape(-1)[:: 2**20 + 1] + 1

    x = torch.arange(1000, dtype=torch.int64)
    columns, total, most, least, some = compile_strictly(reduce)(x)
    assert torch.equal(columns, x * rows)
    assert int(total) == rows * 499_500
    assert (int(most), torch.equal(least, x)) == (999, True)
    assert torch.equal(some, torch.arange(0, rows * 1000, 2**20 + 1) % 1000 + 1)


@pytest.mark.huge
def test_sums_and_means_of_floats(compile_strictly: CompileStrictly) -> None:
    def reduce(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.expand(BEYOND)
        return wide.sum(), wide.mean()

    total, mean = compile_strictly(reduce)(torch.tensor([0.75]))
    torch.testing.assert_close(total, torch.tensor(0.75 * BEYOND), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean, torch.tensor(0.75), rtol=1e-5, atol=0)


@pytest.mark.huge
def test_where_the_last_of_many_elements_is(compile_strictly: CompileStrictly, bytes_: Tensor) -> None:
    def search(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(), x[::2].argmax(), (x > 0).sum(), x.amax(), x.sum()

    expected = [int(bytes_.argmax()), int(bytes_[::2].argmax()), int((bytes_ > 0).sum()), 255, int(bytes_.sum())]
    assert [int(v) for v in compile_strictly(search)(bytes_)] == expected


@pytest.mark.huge
def test_writing_near_the_end(compile_strictly: CompileStrictly) -> None:
    def write(x: Tensor, i: Tensor) -> Tensor:
        x[-5:].fill_(9)
        x[i] = 4
        return x[-7:] + 0

    x = torch.zeros(2**31 + 64, dtype=torch.uint8)
    places = torch.tensor([2**31 + 1, 3])
    assert compile_strictly(write)(x, places).tolist() == [0, 0, 9, 9, 9, 9, 9]
    assert x[-5:].tolist() == [9] * 5
    assert (int(x[2**31 + 1]), int(x[3]), int(x[2**31 + 2])) == (4, 4, 0)
