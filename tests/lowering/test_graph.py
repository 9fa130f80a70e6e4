"""Whole graphs: inputs written in place, outputs that alias, and graphs with little or nothing in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchkiln
from tests.lowering.against_eager import difference, layouts, specimen

Compile = Callable[..., Any]


def _same_effects(
    compile_strictly: Compile, function: Callable[..., Any], make: Callable[[], list[torch.Tensor]], calls: int = 2
) -> None:
    """Results, inputs after the call, and which results share memory with which inputs."""
    run = compile_strictly(function)
    wanted_inputs, got_inputs = make(), make()
    for _ in range(calls):
        wanted, got = _flat(function(*wanted_inputs)), _flat(run(*got_inputs))
        assert len(wanted) == len(got)
        for position, (a, b) in enumerate(zip(got, wanted, strict=True)):
            if not isinstance(b, torch.Tensor):
                assert a == b
                continue
            complaint = difference(a, b, slack=2)
            assert complaint is None, f"result {position}: {complaint}"
        for position, (a, b) in enumerate(zip(got_inputs, wanted_inputs, strict=True)):
            complaint = difference(a, b, slack=2)
            assert complaint is None, f"input {position} afterwards: {complaint}"
        assert _sharing(got, got_inputs) == _sharing(wanted, wanted_inputs)


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _sharing(results: list[Any], inputs: list[torch.Tensor]) -> list[tuple[int, int]]:
    tensors = [t for t in [*results, *inputs] if isinstance(t, torch.Tensor) and t.numel()]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    return [(a, b) for a in range(len(storages)) for b in range(a) if storages[a] == storages[b]]


def _pair() -> list[torch.Tensor]:
    return [specimen(torch.float32, (4, 9), tame=True), specimen(torch.float32, (4, 9), 1, tame=True)]


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def _mix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = a.sum(0)
    a.add_(b)
    b.mul_(a)
    a[:, 1:].sub_(b[:, :-1])
    return before + a.sum(0)


def _shift(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a[:, 1:] = a[:, :-1].clone()
    return a + b


def _mutate_twice(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    first = a * 1
    a.mul_(2)
    second = a + b
    a.mul_(2)
    return first + second + a


def _transposed(a: torch.Tensor, b: torch.Tensor) -> None:
    a.copy_(a[:, :4].t().contiguous().repeat(1, 3)[:, :9])


def _reduction_into_input(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.sub_(a.amax(1, keepdim=True))
    b.copy_(a.softmax(1))
    return b.sum()


def _product_of_mutated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    result = a @ b.t()
    a.zero_()
    return result


MUTATIONS: dict[str, Callable[..., Any]] = {
    "add_": lambda a, b: a.add_(b),
    "no result": lambda a, b: (a.mul_(b), None)[1],
    "slice": lambda a, b: a[:, 1:].mul_(2),
    "row": lambda a, b: a[1].copy_(b[2]),
    "column step": lambda a, b: a[:, ::2].fill_(3),
    "swap": _swap,
    "mix": _mix,
    "shift": _shift,
    "twice": _mutate_twice,
    "transposed": _transposed,
    "reduction": _reduction_into_input,
    "product": _product_of_mutated,
    "view": lambda a, b: a.view(-1)[3:7].add_(1),
    "flip": lambda a, b: a.copy_(a.flip(0)),
    "roll": lambda a, b: a.copy_(a.roll(1, 1)),
    "broadcast": lambda a, b: a.copy_(b[0]),
    "index": lambda a, b: a.index_copy_(0, torch.tensor([2, 0]), b[:2]),
    "masked": lambda a, b: a.masked_fill_(b > 0, 0.5),
    "swap rows": lambda a, b: a.copy_(a[torch.tensor([1, 0, 3, 2])]),
    "clamp_": lambda a, b: (a.clamp_(-1, 1), b.clamp_(min=a)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_inputs_are_written_as_eager_writes_them(compile_strictly: Compile, name: str) -> None:
    _same_effects(compile_strictly, MUTATIONS[name], _pair)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset"])
@pytest.mark.parametrize("name", ["add_", "swap", "mix", "shift", "flip", "slice"])
def test_inputs_of_every_layout_are_written(compile_strictly: Compile, name: str, layout: str) -> None:
    def make() -> list[torch.Tensor]:
        a, b = _pair()
        return [layouts(a)[layout], b.clone()]

    _same_effects(compile_strictly, MUTATIONS[name], make)


def test_memory_around_a_written_slice_stays(compile_strictly: Compile) -> None:
    memory = torch.full((6, 20), -7.0)
    view = memory[1:5, 2:17:3]
    compile_strictly(lambda x: x.add_(100))(view)
    assert int((memory == 93).sum()) == view.numel()
    assert int((memory == -7).sum()) == memory.numel() - view.numel()


def test_half_and_integer_inputs_are_written(compile_strictly: Compile) -> None:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        a.mul_(2).add_(c[0])
        b.add_(c.long())
        c.neg_()

    _same_effects(
        compile_strictly,
        function,
        lambda: [
            specimen(torch.bfloat16, (3, 5), tame=True),
            torch.arange(15).view(3, 5),
            specimen(torch.float32, (3, 5), tame=True),
        ],
    )


ALIASES: dict[str, Callable[..., Any]] = {
    "input itself": lambda a, b: a,
    "input twice": lambda a, b: (a, a, b + 1),
    "view of input": lambda a, b: (a.t(), a[1:], a.view(-1)),
    "same result twice": lambda a, b: (lambda c: (c, c))(a + b),
    "views of one result": lambda a, b: (lambda c: (c, c.t(), c[1:, ::2], c.view(6, 6)))(a + b),
    "view and computed": lambda a, b: (a[0], a[0] + 1),
    "detached": lambda a, b: (a + b).detach(),
    "expanded": lambda a, b: (a + b)[:1].expand(3, 9),
    "mutated and returned": lambda a, b: (a.add_(1), a.t()),
    "numbers and None": lambda a, b: (None, a + b, 3, a.shape[0]),
    "slice of result": lambda a, b: (a + b)[1:3, 2:5],
    "transposed result": lambda a, b: (a * b).t(),
    "diagonal of result": lambda a, b: (a * b).diagonal(),
}


@pytest.mark.parametrize("name", ALIASES)
def test_results_alias_as_in_eager(compile_strictly: Compile, name: str) -> None:
    _same_effects(compile_strictly, ALIASES[name], _pair)


SMALL: dict[str, Callable[..., Any]] = {
    "nothing": lambda a: None,
    "constant": lambda a: torch.ones(3),
    "0-dim": lambda a: a.sum(),
    "0-dim input": lambda a: a[0, 0] * 2,
    "empty result": lambda a: a[:0] * 2,
    "only views": lambda a: a.t().unsqueeze(0),
    "only an extern": lambda a: a @ a.t(),
    "dead code": lambda a: (a.exp().sum(), a + 1)[1],
    "python numbers": lambda a: a.shape[0] * 2,
}


@pytest.mark.parametrize("name", SMALL)
def test_graphs_with_little_in_them(compile_strictly: Compile, name: str) -> None:
    _same_effects(compile_strictly, SMALL[name], lambda: _pair()[:1])


def test_the_same_tensor_given_twice(compile_strictly: Compile) -> None:
    x, y = specimen(torch.float32, (4, 5), tame=True), specimen(torch.float32, (4, 5), tame=True)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    run = compile_strictly(function)
    torch.testing.assert_close(run(x, x), function(y, y))
    torch.testing.assert_close(x, y)


def test_overlapping_inputs_are_written_as_in_eager(compile_strictly: Compile) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return a + b

    one, two = torch.arange(20.0), torch.arange(20.0)
    torch.testing.assert_close(compile_strictly(function)(one[:10], one[5:15]), function(two[:10], two[5:15]))
    torch.testing.assert_close(one, two)


def test_results_do_not_change_when_the_function_runs_again(compile_strictly: Compile) -> None:
    run = compile_strictly(lambda a, b: (a + b, (a * b).sum(1)))
    a, b = _pair()
    first = run(a, b)
    kept = [t.clone() for t in first]
    run(a * 2, b * 3)
    assert all(torch.equal(x, y) for x, y in zip(first, kept, strict=True))


@pytest.mark.parametrize("sizes", [(3, 5, 8, 3), (1, 2), (0, 4)])
def test_each_size_of_a_dynamic_input_gives_its_own_result(sizes: tuple[int, ...]) -> None:
    def function(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        y = torch.cat([x, x[: x.shape[0] // 2]])
        return y.softmax(-1), x.sum(0) * n + torch.arange(x.shape[1]), x.shape[0] * 2

    run = torch.compile(function, backend="kiln", dynamic=True, options={"fallback": False})
    for size in sizes:
        x = specimen(torch.float32, (size, 6), size, tame=True)
        torch.testing.assert_close(run(x, size), function(x, size))


def test_an_operator_without_a_lowering_runs_between_kernels(compile_strictly: Compile) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, order = (x * 2).kthvalue(2, 1, keepdim=True)
        return values.logcumsumexp(1) + order.to(torch.float32)

    x = specimen(torch.float32, (4, 9), tame=True)
    torchkiln.reset_stats()
    torch.testing.assert_close(compile_strictly(function)(x), function(x))
    assert set(torchkiln.stats().extern_calls) == {"aten.kthvalue.default", "aten.logcumsumexp.default"}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stft(x, 7, center=True, return_complex=True, window=torch.ones(7)),
        lambda x: torch.fft.rfft(x)[None, 1:5:2].unsqueeze(2),
        lambda x: torch.fft.fft2(x.view(2, 5))[:, 1:].t().contiguous().abs(),
    ],
    ids=["stft", "slices", "transposed"],
)
def test_views_of_complex_results_are_those_of_eager(compile_strictly: Compile, function: Compile) -> None:
    x = torch.linspace(-1, 1, 10)
    expected, found = function(x), compile_strictly(function)(x)
    torch.testing.assert_close(found, expected, check_stride=True)
