"""What goes wrong at run time: eager's class of error, the user's line, and a process that can go on."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchkiln.graph.native_operators import CHECK
from torchkiln.lowering.builder import Builder
from torchkiln.runtime.arena import arena_stats

Compile = Callable[..., Any]
X = torch.linspace(-1, 1, 24).reshape(4, 6)
ROWS, BAD_ROWS = torch.tensor([0, 1, 3]), torch.tensor([0, 9, 3])
EVERY = torch.zeros(4, 6, dtype=torch.int64)
ONE_BAD = EVERY.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(50))
SOME = torch.ones(3, 6)

# Name: function of (x, positions), good positions, bad ones.
CASES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], torch.Tensor, torch.Tensor]] = {
    "index": (lambda x, i: x[i] + 1, ROWS, BAD_ROWS),
    "index, second dimension": (lambda x, i: x[:, i] * 2, ROWS, BAD_ROWS),
    "index, too negative": (lambda x, i: x[i] + 1, -ROWS, torch.tensor([0, -5, 1])),
    "index, two tensors": (lambda x, i: x[i, i], ROWS, BAD_ROWS),
    "index, sliced away": (lambda x, i: x[i][:1] * 2, ROWS, BAD_ROWS),
    "index, dimension of size 1": (lambda x, i: x[:1][i], ROWS * 0, ROWS),
    "gather": (lambda x, i: x.gather(1, i) + 1, EVERY, ONE_BAD),
    "gather, sliced away": (lambda x, i: x.gather(1, i)[0] + 1, EVERY, ONE_BAD),
    "gather, negative": (lambda x, i: x.gather(1, i) + 1, EVERY, EVERY - 1),
    "index_select": (lambda x, i: x.index_select(0, i) + 1, ROWS, BAD_ROWS),
    "index_select, negative": (lambda x, i: x.index_select(0, i) + 1, ROWS, -ROWS),
    "embedding": (lambda x, i: F.embedding(i, x) + 1, ROWS, BAD_ROWS),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x) + 1, ROWS, BAD_ROWS),
    "take": (lambda x, i: x.take(i) + 1, ROWS, ROWS + 100),
    "scatter": (lambda x, i: x.scatter(1, i, 1.0) + 1, EVERY, ONE_BAD),
    "scatter_add": (lambda x, i: x.scatter_add(1, i, x) + 1, EVERY, ONE_BAD),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(1, i, x, "amax") + 1, EVERY, ONE_BAD),
    "index_put": (lambda x, i: x.index_put((i,), SOME) + 1, ROWS, BAD_ROWS),
    "index_put, accumulating": (lambda x, i: x.index_put((i,), SOME, accumulate=True) + 1, ROWS, BAD_ROWS),
    "index_add": (lambda x, i: x.index_add(0, i, SOME), ROWS, BAD_ROWS),
    "index_copy": (lambda x, i: x.index_copy(0, i, SOME), ROWS, BAD_ROWS),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), ROWS, BAD_ROWS),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), torch.tensor([0, 1, 2, 5]), torch.tensor([0, 1, 2, 30])),
    "one_hot": (lambda x, t: F.one_hot(t, 6) + x.sum(), ROWS, BAD_ROWS),
    "division of integers": (lambda x, i: i // (i - 1), ROWS + 5, ROWS),
    "remainder of integers": (lambda x, i: i % (i - 1), ROWS + 5, ROWS),
    "multinomial": (lambda x, i: torch.multinomial(i.float(), 1) * 0, ROWS + 1, -ROWS),
    "bernoulli": (lambda x, i: torch.bernoulli(i.float()) * 0, ROWS * 0, ROWS),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_values_raise_what_eager_raises_and_the_next_call_is_right(name: str, compile_strictly: Compile) -> None:
    function, good, bad = CASES[name]
    expected = function(X, good)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        function(X, bad)
    run = compile_strictly(function)
    torch.testing.assert_close(run(X, good), expected)
    for _ in range(2):
        with pytest.raises(eager.type) as caught:
            run(X, bad)
        assert type(caught.value) is eager.type
        printed = "".join(traceback.format_exception(caught.value))
        assert f"{__file__}:{function.__code__.co_firstlineno}" in printed
    torch.testing.assert_close(run(X, good), expected)


def test_the_line_is_that_of_the_operator_and_not_of_its_kernel(compile_strictly: Compile) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        first = x[i]
        second = x[j]
        return (first + second).sin() * 2

    start = function.__code__.co_firstlineno
    run = compile_strictly(function)
    run(X, ROWS, ROWS)
    for line, arguments in ((1, (BAD_ROWS, ROWS)), (2, (ROWS, BAD_ROWS))):
        with pytest.raises(IndexError, match=f":{start + line} in function"):
            run(X, *arguments)


@pytest.mark.usefixtures("no_cache")  # lowering is watched
def test_positions_known_to_be_in_range_are_not_checked(
    compile_strictly: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every table of relative positions would be read a second time."""
    called: list[object] = []
    original = Builder.extern

    def recording(self: Builder, target: Any, *rest: Any) -> Any:
        called.append(target)
        return original(self, target, *rest)

    monkeypatch.setattr(Builder, "extern", recording)
    assert torch.equal(compile_strictly(lambda x: x[torch.arange(4)] + 1)(X), X + 1)
    assert called == []
    compile_strictly(lambda x, i: x[i] + 1)(X, ROWS)
    assert called == [CHECK]


def test_failures_give_back_the_arena(compile_strictly: Compile) -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = (x @ x.t()).softmax(1)
        return (y[i] @ y).index_add(0, i, y)

    run = compile_strictly(function)
    x, good = torch.randn(64, 64), torch.arange(64)
    bad = good + 64
    expected = function(x, good)
    torch.testing.assert_close(run(x, good), expected)
    before = arena_stats()
    for _ in range(50):
        with pytest.raises(IndexError):
            run(x, bad)
    torch.testing.assert_close(run(x, good), expected)
    assert arena_stats() == before


def test_an_input_is_not_written_after_what_eager_would_have_refused(compile_strictly: Compile) -> None:
    def function(x: torch.Tensor, i: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        y = x[i] * 2
        count.add_(1)
        return y

    run = compile_strictly(function)
    count = torch.zeros(3)
    run(X, ROWS, count)
    with pytest.raises(IndexError):
        run(X, BAD_ROWS, count)
    assert count.tolist() == [1, 1, 1]


def test_threads_that_fail_do_not_disturb_others(compile_strictly: Compile) -> None:
    run = compile_strictly(lambda x, i: x[i].sin() + x.index_add(0, i, x[i])[i])
    x, good = torch.randn(40, 8), torch.arange(40)
    bad, expected = good + 1, run(x, good)
    outcomes: list[object] = []

    def work(positions: torch.Tensor) -> None:
        for _ in range(30):
            try:
                outcomes.append(torch.equal(run(x, positions), expected))
            except IndexError:
                outcomes.append("IndexError")

    workers = [threading.Thread(target=work, args=(p,)) for p in (good, bad, good, bad)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert outcomes.count(True) == 60
    assert outcomes.count("IndexError") == 60


MISMATCHES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {
    "shape": (lambda x, y: x + y, (X, X), (X, X[:3])),
    "shape of a product": (lambda x, y: x @ y, (X, X.t()), (X, X)),
    "dtype": (lambda x, y: x @ y, (X, X.t()), (X, X.t().double())),
    "dtype of positions": (lambda x, y: x.gather(1, y), (X, EVERY), (X, X)),
    "device": (lambda x, y: x + y, (X, X), (X, X.to("meta"))),
    "dimension": (lambda x, y: x.sum(1) + y.sum(1), (X, X), (X, X[0])),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_arguments_that_do_not_fit_raise_what_eager_raises(name: str) -> None:
    """Dynamo compiles again for them, and whoever notices raises; its errors are subclasses of eager's.

    Before torch 2.13 it has an error of its own for some.
    """
    function, good, bad = MISMATCHES[name]
    with pytest.raises((RuntimeError, IndexError)) as eager:
        function(*bad)
    with pytest.raises((RuntimeError, IndexError)) as captured:
        torch.compile(function, backend="eager")(*bad)
    run = torch.compile(function, backend="kiln")
    expected = function(*good)
    torch.testing.assert_close(run(*good), expected)
    with pytest.raises((eager.type, captured.type)) as caught:
        run(*bad)
    printed = "".join(traceback.format_exception(caught.value))
    assert f"{__file__}" in printed
    assert f"line {function.__code__.co_firstlineno}" in printed or f":{function.__code__.co_firstlineno}" in printed
    torch.testing.assert_close(run(*good), expected)
