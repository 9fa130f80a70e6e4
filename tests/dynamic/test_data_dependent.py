"""Sizes and numbers that depend on data: what a tensor holds decides how the graph goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torchkiln


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def _checked_range(x: torch.Tensor) -> torch.Tensor:
    count = x.sum().item()
    torch._check(count >= 0)
    torch._check(count < 100)
    return torch.arange(count) * 2


def _two_masks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum() + (y[y > 0] * 2).sum()


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


PROGRAMS: dict[str, tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]] = {
    "positions": (lambda x: x.nonzero() * 2, [(torch.tensor([0.0, 1, 2, 0]),), (torch.zeros(4),), (torch.ones(4),)]),
    "by a mask": (lambda x: x[x > 0] + 1, [(r(20),), (r(20),), (-torch.ones(20),), (torch.ones(20),)]),
    "sum of a mask": (lambda x: x[x > 0].exp().sum(), [(r(300),), (-torch.ones(300),)]),
    "two masks": (_two_masks, [(r(9), r(30)), (r(9), -torch.ones(30))]),
    "selected": (lambda x: torch.masked_select(x, x > 0).sin(), [(r(20, 3),), (r(20, 3),)]),
    "a number": (lambda x, y: y + x.sum().item(), [(torch.tensor([1, 2]), r(4)), (torch.tensor([-9, 2]), r(4))]),
    "a float": (lambda x, y: y * x.sum().item(), [(r(3), r(4)), (r(3), r(4))]),
    "returned": (lambda x: x.max().item() * 2, [(torch.tensor([1, 7]),), (torch.tensor([-4, -5]),)]),
    "one mask twice": (lambda x: (x[x > 0].sum(), x[x > 0].softmax(0)), [(r(9),), (r(9),)]),
    "one number twice": (
        lambda x: (torch.ones(x.sum().item()), torch.zeros(x.sum().item()) + 1),
        [(torch.tensor([1, 2]),), (torch.tensor([0, 0]),)],
    ),
    "a range": (_checked_range, [(torch.tensor([1, 2, 3]),), (torch.tensor([0, 0, 0]),), (torch.tensor([9, 90, 0]),)]),
    "repeats": (
        lambda x, n: torch.repeat_interleave(x, n) + 1,
        [(r(3), torch.tensor([1, 2, 3])), (r(3), torch.tensor([4, 0, 3]))],
    ),
    "distinct": (lambda x: torch.unique(x) * 2, [(torch.tensor([1, 2, 3, 1]),), (torch.tensor([1, 1, 1, 1]),)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager_with_one_compilation(name: str) -> None:
    fn, argument_sets = PROGRAMS[name]
    torchkiln.reset_stats()
    compiled = torch.compile(fn, backend="kiln", fullgraph=True, options={"fallback": False})
    for arguments in argument_sets:
        torch.testing.assert_close(compiled(*arguments), fn(*arguments))
    assert torchkiln.stats().graphs == 1


def test_a_number_outside_of_what_was_promised_is_an_error_and_the_next_call_is_fine() -> None:
    compiled = torch.compile(_checked_range, backend="kiln", fullgraph=True, options={"fallback": False})
    good = torch.tensor([1, 2, 3])
    torch.testing.assert_close(compiled(good), _checked_range(good))
    with pytest.raises(RuntimeError):
        _checked_range(torch.tensor([90, 90, 90]))
    with pytest.raises(RuntimeError, match="_checked_range"):
        compiled(torch.tensor([90, 90, 90]))
    torch.testing.assert_close(compiled(good), _checked_range(good))


def test_an_empty_dimension_of_at_most_one_element_is_not_read() -> None:
    # The only position there could be is known to be 0, so that reading it does not depend on any loop.
    compiled = torch.compile(lambda x: torch.nonzero(x, as_tuple=True), backend="kiln", fullgraph=True)
    for value in (1.0, 0.0, 3.0):
        x = torch.tensor(value)
        torch.testing.assert_close(compiled(x), torch.nonzero(x, as_tuple=True))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_results_that_were_not_asked_for_may_have_any_size(inverse: bool, counts: bool, dim: int | None) -> None:
    """With a dimension, eager computes all three results of unique_consecutive, and torch's shapes say it does not."""

    def function(x: torch.Tensor) -> object:
        return torch.unique_consecutive(x, return_inverse=inverse, return_counts=counts, dim=dim)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False})
    for x in (torch.tensor([[1, 1, 2], [1, 1, 2], [3, 3, 2]]), torch.ones(3, 3, dtype=torch.int64)):
        torch.testing.assert_close(compiled(x), function(x))
