"""Views whose place or length the data decides: slices, selections and other strides, counted from either end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torchkiln

Tensor = torch.Tensor
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def _strictly(function: Function) -> Function:
    compiled: Function = torch.compile(function, backend="kiln", fullgraph=True, options={"fallback": False})
    return compiled


def _written(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        result = x + 1
        view(result).mul_(3)
        return result

    return function


# Of a tensor of as many elements as the data says, of which there may be none.
PARTS: dict[str, Callable[[Tensor], Any]] = {
    "from the last": lambda u: u[-1:],
    "from the last but two": lambda u: u[-3:],
    "without the last": lambda u: u[:-1],
    "between two from the end": lambda u: u[-3:-1],
    "from the front to the end": lambda u: u[1:-1],
    "beyond the end": lambda u: u[-100:100],
    "every other from the end": lambda u: u[-4::2],
    "shifted": lambda u: (u * 2)[1:] * 3,
    "tail as rows": lambda u: u.view(-1, 1)[-2:, -1],
    "tail of a tail": lambda u: u[-3:][-1:],
    "computed with": lambda u: u[-2:].exp().sum(),
    "flipped": lambda u: u[-2:].flip(0),
    "written": _written(lambda u: u[-2:]),
    "written to the front": _written(lambda u: u[:-1]),
}
SOME = (torch.tensor([3.0, 0, 1, 3, 2, 5]), torch.tensor([0.0, 1, 0, 0, 0, 0]), torch.arange(6.0), torch.zeros(6))


@pytest.mark.parametrize("name", PARTS)
def test_a_part_counted_from_the_end_is_eagers_however_many_there_are(name: str) -> None:
    def function(x: Tensor) -> list[Any]:
        return [PARTS[name](x[x > 0]), PARTS[name](x.nonzero()[:, 0])]

    compiled = _strictly(function)
    torchkiln.reset_stats()
    for x in SOME:
        torch.testing.assert_close(compiled(x), function(x))
    assert torchkiln.stats().graphs == 1


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("take", [lambda u: u[-1], lambda u: u[0], lambda u: u.narrow(0, -1, 1) + 1])
def test_the_last_of_none_is_an_error(take: Function) -> None:
    compiled = _strictly(lambda x: take(x.unique()[: x.sum().item()]))
    for x in (torch.tensor([3, 1, 2]), torch.tensor([1, 0, 0])):
        torch.testing.assert_close(compiled(x), take(x.unique()[: x.sum().item()]))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(torch.zeros(3, dtype=torch.int64))


@pytest.mark.usefixtures("everything_compiled")
def test_gradients_flow_through_a_tail() -> None:
    def function(x: Tensor) -> Tensor:
        return (x[x > 0][-2:] ** 2).sum()

    compiled = _strictly(function)
    for values in SOME:
        x = values.clone().requires_grad_()
        (expected,), (found,) = (torch.autograd.grad(run(x), x) for run in (function, compiled))
        torch.testing.assert_close(found, expected)


# Of a tensor and a number read from another; the data decides where a view starts, and how long it is.
STRIDED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "an input": lambda x, n: x.as_strided((2,), (1,), n),
    "an input of any length": lambda x, n: x.as_strided((n,), (2,)),
    "a value": lambda x, n: (x * 2).as_strided((2,), (1,), n),
    "a value, computed with": lambda x, n: (x * 2).as_strided((2,), (1,), n) + 1,
    "as many of a value": lambda x, n: (x * 2).as_strided((n,), (1,), 1),
    "so far apart": lambda x, n: (x * 2).as_strided((2,), (n,), 1),
    "around a part": lambda x, n: (x * 2)[2:3].as_strided((2, 2), (1, 1), n),
    "of a transposed value": lambda x, n: (x.view(2, 4).t() * 2).as_strided((2,), (3,), n) + 1,
    "none": lambda x, n: (x * 2).as_strided((0, 3), (1, 1), n),
    "of distinct ones": lambda x, n: x.unique().as_strided((2,), (1,), n),
    "written": lambda x, n: (y := x * 2, y.as_strided((2,), (1,), n).add_(1))[0],
}


@pytest.mark.usefixtures("everything_compiled")
@pytest.mark.parametrize("name", STRIDED)
def test_other_strides_from_where_the_data_says(name: str) -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return STRIDED[name](x, n.item())

    compiled, x = _strictly(function), torch.arange(8.0)
    for number in (2, 0, 1, 3, 4):
        found, expected = compiled(x, torch.tensor(number)), function(x, torch.tensor(number))
        torch.testing.assert_close(found, expected)
        if expected.numel():
            assert found.storage_offset() == expected.storage_offset()


@pytest.mark.parametrize("name", ["a value", "a value, computed with", "as many of a value", "of distinct ones"])
def test_places_outside_of_the_storage_are_refused(name: str) -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        return STRIDED[name](x, n.item())

    compiled, x, good = _strictly(function), torch.arange(8.0), torch.tensor(2)
    compiled(x, good)
    for number in (8, 2**40, 2**62, -1):
        for run in (function, compiled):
            with pytest.raises(RuntimeError):
                run(x, torch.tensor(number))
        torch.testing.assert_close(compiled(x, good), function(x, good))


def _sizes(function: Function, numbers: Sequence[int]) -> None:
    compiled = _strictly(function)
    for count in numbers:
        x = (torch.arange(6) < count).float()
        torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.usefixtures("everything_compiled")
def test_one_element_or_none_is_written_through_an_expanded_view() -> None:
    def into_a_value(x: Tensor) -> list[Tensor]:
        large = x.cumsum(0)[-1:].clone() + 1e8
        large.expand(x.nonzero().size(0)).sub_(1e8)
        return [large, large * 2]

    def into_rows(x: Tensor) -> Tensor:
        rows = x.view(-1, 1) + 1
        rows[:1].expand(-1, 1).expand(x.nonzero().size(0), 1)[:] = -0.0
        return rows

    _sizes(into_a_value, (0, 1, 0))
    _sizes(into_rows, (0, 1, 0))


def test_two_elements_of_one_place_are_refused_as_eager_refuses_them() -> None:
    def function(x: Tensor) -> Tensor:
        result = torch.full((1,), 3.0)
        result.expand(x.nonzero().size(0)).add_(1)
        return result

    compiled = _strictly(function)
    torch.testing.assert_close(compiled(torch.zeros(3)), function(torch.zeros(3)))
    for run in (function, compiled):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            run(torch.ones(3))
    torch.testing.assert_close(compiled(torch.eye(3)[0]), function(torch.eye(3)[0]))


@pytest.mark.usefixtures("everything_compiled")
def test_one_value_may_be_written_to_all() -> None:
    def function(x: Tensor) -> Tensor:
        result = x[:1] + 3
        result.expand(x.nonzero().size(0)).fill_(7)
        return result

    _sizes(function, (0, 1, 2, 5))
