"""Numbers known only at run time, wherever a program may take one: branches, results, arguments, positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torchkiln
from torchkiln.errors import FallbackWarning


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def _compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="kiln", fullgraph=True, options={"fallback": False}, **options)


def test_a_branch_on_a_size_is_taken_by_the_size() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.shape[0] > 4, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled = _compiled(fn)
    for size in (3, 9, 4, 5):
        y = torch.randn(size)
        torch._dynamo.mark_dynamic(y, 0)
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x, y), x + 1 if size > 4 else x - 1)


def test_a_branch_on_a_number_read_from_a_tensor() -> None:
    compiled = _compiled(lambda x, t: torch.cond(t.item() > 4, lambda x: x + 1, lambda x: x - 1, (x,)))
    x = torch.randn(3)
    for number in (3, 9):
        torch.testing.assert_close(compiled(x, torch.tensor(number)), x + 1 if number > 4 else x - 1)


def test_a_comparison_of_sizes_is_returned_as_its_truth() -> None:
    compiled = torch.compile(lambda x: (x.shape[0] > 3, x + 1), backend="kiln", dynamic=True)
    for size in (5, 3, 7):
        truth, _ = compiled(torch.randn(size))
        assert truth is (size > 3)


def test_positions_in_a_dimension_that_turns_out_empty() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[x > 10][i] + 1

    compiled = _compiled(fn)
    i = torch.tensor([0, 1])
    torch.testing.assert_close(compiled(torch.arange(20.0), i), fn(torch.arange(20.0), i))
    with pytest.raises(IndexError):
        compiled(torch.zeros(20), i)
    torch.testing.assert_close(compiled(torch.arange(20.0), i), fn(torch.arange(20.0), i))


def test_the_larger_of_a_number_and_one_is_not_the_number() -> None:
    def fn(t: torch.Tensor) -> torch.Tensor:
        n = t.item()
        torch._check(n >= 0)
        return torch.ones(torch.sym_max(n, 1))

    compiled = _compiled(fn)
    for number in (0, 1, 5):
        assert compiled(torch.tensor(number)).shape == (max(number, 1),)


@pytest.mark.parametrize("smaller", [True, False])
def test_the_smaller_and_the_larger_of_two_sizes_compile_once(smaller: bool) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n = (torch.sym_min if smaller else torch.sym_max)(x.shape[0], y.shape[0])
        return (torch.ones(3, n).cumsum(1) * x.sum() + y.sum()).t() + 1

    torchkiln.reset_stats()
    compiled = _compiled(fn, dynamic=True)
    for a, b in ((3, 5), (7, 4), (6, 6)):
        x, y = torch.randn(a), torch.randn(b)
        torch.testing.assert_close(compiled(x, y), fn(x, y))
    assert torchkiln.stats().graphs == 1
    assert not torchkiln.stats().per_size


def test_a_truth_read_from_a_tensor() -> None:
    def fn(x: torch.Tensor, t: torch.Tensor) -> Any:
        truth = t.item()
        return truth, torch.cond(truth, lambda x: x + 1, lambda x: x - 1, (x,))

    compiled, x = _compiled(fn), torch.randn(3)
    for value in (True, False):
        truth, result = compiled(x, torch.tensor(value))
        assert truth is value
        torch.testing.assert_close(result, x + 1 if value else x - 1)


def test_several_conditions_on_one_number() -> None:
    def fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        n = t.item()
        inside = torch.sym_ite((n > 2) & (n < 6) | (n == 9), 1, 0)
        return x + inside

    compiled, x = _compiled(fn), torch.zeros(2)
    for number in (2, 3, 5, 6, 9):
        torch.testing.assert_close(compiled(x, torch.tensor(number)), x + int(2 < number < 6 or number == 9))


def test_a_check_of_several_conditions_raises_where_they_do_not_hold() -> None:
    def fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        n = t.item()
        torch._check((n == 2) | (n == 5))
        return x + n

    compiled, x = _compiled(fn), torch.zeros(2)
    torch.testing.assert_close(compiled(x, torch.tensor(5)), x + 5)
    with pytest.raises(RuntimeError):
        compiled(x, torch.tensor(3))
    torch.testing.assert_close(compiled(x, torch.tensor(2)), x + 2)


def _pieces(x: torch.Tensor, at: torch.Tensor) -> Any:
    return [piece * 2 for piece in torch.tensor_split(x, at)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_slices_between_positions_read_from_a_tensor(dynamic: bool | None) -> None:
    compiled, x = _compiled(_pieces, dynamic=dynamic), torch.randn(7, 3)
    for at in ((2, 4), (-5, -1), (0, 9), (5, 3), (-20, 20)):
        pieces = _pieces(x, torch.tensor(at))
        found = compiled(x, torch.tensor(at))
        assert [p.shape for p in found] == [p.shape for p in pieces]
        torch.testing.assert_close(found, pieces)


@pytest.mark.parametrize("start", [0, 3, -2, -5])
def test_a_slice_of_fixed_length_from_a_start_read_from_a_tensor(start: int) -> None:
    compiled, x = _compiled(lambda x, t: torch.narrow(x, 0, t, 2) + 1), torch.randn(5, 3)
    torch.testing.assert_close(compiled(x, torch.tensor(start)), torch.narrow(x, 0, torch.tensor(start), 2) + 1)


@pytest.mark.parametrize("start", [4, 10**12, -6, -(10**12)])
def test_a_slice_that_leaves_its_dimension_raises_and_reads_nothing(start: int) -> None:
    compiled, x = _compiled(lambda x, t: torch.narrow(x, 0, t, 2) + 1), torch.randn(5, 3)
    with pytest.raises((RuntimeError, IndexError)):
        torch.narrow(x, 0, torch.tensor(start), 2)
    with pytest.raises((RuntimeError, IndexError)):
        compiled(x, torch.tensor(start))
    torch.testing.assert_close(compiled(x, torch.tensor(1)), x[1:3] + 1)


def test_an_element_at_a_position_read_from_a_tensor() -> None:
    compiled, x = _compiled(lambda x, t: x[t.item()] * 2), torch.randn(5, 3)
    for position in (0, 4, -1, -5):
        torch.testing.assert_close(compiled(x, torch.tensor(position)), x[position] * 2)
    for position in (5, -6, 10**12):
        with pytest.raises(IndexError):
            compiled(x, torch.tensor(position))


@pytest.mark.parametrize(
    "number",
    [
        torch.tensor(65535, dtype=torch.uint16),
        torch.tensor(2**32 - 1, dtype=torch.uint32),
        torch.tensor(200, dtype=torch.uint8),
        torch.tensor(-5, dtype=torch.int8),
        torch.tensor(2**50),
        torch.tensor(-(2**50)),
    ],
    ids=str,
)
def test_numbers_of_every_width(number: torch.Tensor) -> None:
    x = torch.zeros(3, dtype=torch.int64)
    assert torch.equal(_compiled(lambda x, t: x + t.item())(x, number), x + number.item())


def test_a_float_is_read_before_the_tensor_is_written_to() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = x.sum().item()
        x.mul_(100)
        return torch.full((2,), value), x + 1

    x = torch.ones(3)
    expected = fn(x.clone())
    torch.testing.assert_close(_compiled(fn)(x), expected)


def test_a_float_where_an_operator_of_torch_takes_a_number() -> None:
    compiled = torch.compile(lambda x, v: torch.histc(x, bins=4, min=v.item(), max=3.0), backend="kiln")
    x = torch.randn(50)
    with pytest.warns(FallbackWarning, match="known only at run time"):
        compiled(x, torch.tensor(0.0))
    torch.testing.assert_close(compiled(x, torch.tensor(-1.0)), torch.histc(x, bins=4, min=-1.0, max=3.0))


def test_rows_known_at_run_time_with_nothing_in_them() -> None:
    torchkiln.reset_stats()
    compiled = _compiled(lambda x: x.sum(1) + 1, dynamic=None)
    for rows in (5, 8):
        x = torch.ones(rows, 0)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), torch.ones(rows))
    assert not torchkiln.stats().per_size


def test_a_size_that_only_an_unread_input_tells() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * 2 + x.shape[0]

    graph = make_fx(fn, tracing_mode="symbolic")(torch.randn(4), torch.randn(8))
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        assert node.args[0].name == "x_1"
    compiled = torchkiln.compile_fx_inner(graph, [])
    x, y = torch.randn(5), torch.randn(10)
    torch.testing.assert_close(compiled([x, y])[0], fn(x, y))


def test_the_last_of_a_dimension_that_turns_out_empty() -> None:
    compiled, x = _compiled(lambda x: x[x > 10][-1] + 1), torch.arange(20.0)
    torch.testing.assert_close(compiled(x), torch.tensor(20.0))
    with pytest.raises((IndexError, RuntimeError)):  # torch takes the size to be 1 or more, which is checked first
        compiled(torch.zeros(20))
    torch.testing.assert_close(compiled(x), torch.tensor(20.0))
