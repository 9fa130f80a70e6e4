"""Inputs whose memory does not begin at a multiple of 16 bytes, on an emulated card whose driver takes no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchkiln
from tests.gpu.emulated_card import EmulatedDriver, emulated

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@pytest.fixture(autouse=True)
def driver() -> Iterator[EmulatedDriver]:
    with emulated() as found, torchkiln.settings(cache=False, fallback=False):
        yield found
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, **options)


def _memory(dtype: torch.dtype, elements: int) -> torch.Tensor:
    values = torch.arange(elements).remainder(7) - 3
    return values.to(dtype)


def _judge(function: Callable[..., Any], run: Any, memory: torch.Tensor, view: Callable[..., Any]) -> None:
    """Results, and all of the memory around the input, are those of eager."""
    mine, theirs = memory.clone(), memory.clone()
    torch.testing.assert_close(run(view(mine)), function(view(theirs)))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_at_any_offset_is_read_and_written(dtype: torch.dtype, driver: EmulatedDriver) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        before = x + x
        x.copy_(torch.where(x == 1, x, before))
        return before

    run, memory = compiled(function), _memory(dtype, 76)
    for offset in (0, 1, 3, 11):
        _judge(function, run, memory, lambda given, at=offset: given[at : at + 64])
    assert torchkiln.stats().graphs
    assert dtype.is_complex or len(driver.launches) >= 4


@pytest.mark.parametrize(
    "view",
    [
        lambda given: given[1:2].expand(64),
        lambda given: given[1:65].view(8, 8).t(),
        lambda given: given[3:].as_strided((6, 4), (10, 2)),
        lambda given: given[1:].as_strided((8, 3), (1, 1)),
        lambda given: given[1:1],
    ],
    ids=["expanded", "transposed", "with gaps", "overlapping", "empty"],
)
def test_memory_of_any_strides_is_read(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    _judge(function, compiled(function), torch.randn(80), view)


def test_gaps_of_memory_that_is_written_stay_as_they_are() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(3).sum()

    for view in (lambda m: m[1:].as_strided((6, 4), (10, 2)), lambda m: m[5:69].view(8, 8).t()):
        _judge(function, compiled(function), torch.randn(80), view)


def test_sizes_may_be_symbolic() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid_().sum(-1)

    run, before = compiled(function, dynamic=True), torchkiln.stats().graphs
    for rows, columns in ((4, 12), (7, 9), (3, 24)):
        _judge(function, run, torch.randn(90), lambda given, r=rows, c=columns: given[3 : 3 + r * c].view(r, c))
    assert torchkiln.stats().graphs == before + 1


def test_operators_of_torch_and_kernels_take_turns_at_writing() -> None:
    def function(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x.index_put_((index,), values, accumulate=True)
        x.add_(1)
        return x.cumsum(0)

    index, values = torch.tensor([3, 3, 0]), torch.randn(3)
    run = compiled(lambda x: function(x, index, values))
    _judge(lambda x: function(x, index, values), run, torch.randn(40), lambda given: given[1:33])


def test_results_share_the_memory_of_the_input() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.view(8, 8)
        return y, y.exp(), x.add_(1), torch.as_strided(x, (4,), (2,), 0)

    run, memory, theirs = compiled(function), torch.randn(70), torch.empty(70)
    theirs.copy_(memory)
    mine = run(memory[1:65])
    torch.testing.assert_close(mine, function(theirs[1:65]))
    assert torch.equal(memory, theirs)
    for k in (0, 2, 3):
        assert mine[k].untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_what_lies_around_an_input_is_read_where_it_lies() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, torch.as_strided(x, (4,), (2,), 0) + 1

    run, memory = compiled(function), torch.randn(40)
    for x in (memory[:8], memory[5:13]):
        torch.testing.assert_close(run(x), function(x))


def test_two_inputs_of_one_storage_are_written_apart() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.mul_(x)
        return x - y

    mine = torch.randn(33)
    theirs = mine.clone()
    torch.testing.assert_close(
        compiled(function)(mine[1::2], mine[2::2]), function(theirs[1::2], theirs[2::2])
    )
    assert torch.equal(mine, theirs)


def test_a_backward_is_given_memory_at_any_offset() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    weight = torch.randn(260)[3:259].view(16, 16).requires_grad_()
    tangent = torch.randn(257)[1:].view(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).tanh()

    expected = torch.autograd.grad(function(x), (x, weight), tangent)
    run = compiled(function)
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(run(x), (x, weight), tangent), expected)


def test_a_storage_that_the_graph_fills_may_hold_the_input_anywhere() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.untyped_storage().resize_(132)
        x.copy_(y * 2)
        x.index_fill_(0, torch.tensor([3]), 7)
        return x * y

    run, y = compiled(function), torch.randn(32)
    for begin in (1, 0):
        mine, theirs = torch.empty(33)[begin : begin + 32], torch.empty(33)[begin : begin + 32]
        for x in (mine, theirs):
            x.untyped_storage().resize_(0)
        torch.testing.assert_close(run(mine, y), function(theirs, y))
        torch.testing.assert_close(mine, theirs)
