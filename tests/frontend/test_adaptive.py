"""Never slower than eager: the faster way is found, taken from the first result on, and said."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchkiln
from torchkiln.frontend import adaptive
from torchkiln.frontend.adaptive import Times, compare


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    yield
    torch._dynamo.reset()
    torchkiln.reset_stats()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """Each comparison that is made; eager always wins it."""
    made: list[Times] = []

    def decided(compiled: Callable[[], object], eager: Callable[[], object]) -> Times:
        compiled()
        eager()
        made.append(Times(2.0, 1.0))
        return made[-1]

    monkeypatch.setattr(adaptive, "compare", decided)
    return made


def _compiled(function: Callable[..., Any], **options: object) -> Callable[..., Any]:
    return torch.compile(function, backend="kiln", options={"fallback": True, **options})


def test_the_way_with_the_shorter_calls_is_found() -> None:
    calls: list[str] = []

    def taking(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            time.sleep(seconds)

        return run

    times = compare(taking("compiled", 0.004), taking("eager", 0.001))
    assert times.eager_is_faster
    assert calls.count("compiled") <= 7, "a few calls, not more"
    times = compare(taking("compiled", 0.001), taking("eager", 0.004))
    assert not times.eager_is_faster


def test_a_graph_that_is_slower_runs_eagerly_and_says_so_once(
    measured: list[Times], caplog: pytest.LogCaptureFixture
) -> None:
    function = _compiled(lambda x: x.sin() + 1)
    x = torch.randn(7)
    with caplog.at_level(logging.WARNING, logger="torchkiln"), torch.no_grad():
        for _ in range(3):
            assert torch.equal(function(x), x.sin() + 1), "bit for bit, since eager ran"
    assert len(measured) == 1
    assert len([r for r in caplog.records if r.name.startswith("torchkiln")]) == 1
    assert "2000.000 ms, eager 1000.000 ms" in caplog.text
    (slower,) = torchkiln.stats().slower
    assert slower.graph == "inference"
    assert "eager was faster     1" in str(torchkiln.stats())
    (graph,) = torchkiln.stats().by_graph
    assert (graph.kind, graph.operations, graph.compiled) == ("inference", 2, False)
    assert "2000.000 ms, eager 1000.000 ms" in graph.reason
    assert str(torchkiln.stats()).startswith("0 % of 2 operations run compiled")


@pytest.mark.parametrize("options", [{"adaptive": False}, {"fallback": False}])
def test_nothing_is_measured_where_that_is_not_wanted(measured: list[Times], options: dict[str, object]) -> None:
    function = _compiled(lambda x: x.sin() + 1, **options)
    with torch.no_grad():
        function(torch.randn(7))
    assert not measured


def _draws(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def _writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize("function", [_draws, _writes])
def test_what_leaves_a_trace_is_not_run_twice(measured: list[Times], function: Callable[[Tensor], Tensor]) -> None:
    compiled = _compiled(function)
    with torch.no_grad():
        torch.manual_seed(0)
        compiled(torch.zeros(4))
    assert not measured


def test_operators_of_others_are_not_run_twice(measured: list[Times]) -> None:
    calls = []

    @torch.library.custom_op("kiln_tests::counted_sine", mutates_args=())
    def counted_sine(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin()

    counted_sine.register_fake(torch.empty_like)
    with torch.no_grad():
        _compiled(lambda x: counted_sine(x) + 1)(torch.randn(3))
    assert len(calls) == 1
    assert not measured


@pytest.mark.usefixtures("no_cache")  # the first call finds no backward
def test_training_is_measured_once_its_backward_is_compiled(measured: list[Times]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).sin()

    compiled = _compiled(function)
    hooked: list[Tensor] = []
    for step in range(3):
        x = torch.randn(4, 4)
        mine, eagers = (torch.full((4, 4), 0.5).requires_grad_() for _ in range(2))
        mine.register_hook(hooked.append)
        compiled(x, mine).sum().backward()
        function(x, eagers).sum().backward()
        torch.testing.assert_close(mine.grad, eagers.grad)
        assert len(measured) == (step > 0)
        assert len(hooked) == step + 1, "measuring runs no hooks of the user"
    assert torchkiln.stats().slower[0].graph == "training"
    assert [(graph.kind, graph.compiled) for graph in torchkiln.stats().by_graph] == [
        ("forward", False),
        ("backward", False),
    ]


def test_measuring_changes_nothing() -> None:
    """With the real comparison, whichever way it goes: results, gradients and the random state are eager's."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x * w).softmax(-1), x.sum()

    compiled = _compiled(function)
    state = torch.get_rng_state()
    for _ in range(3):
        leaves = [torch.linspace(-1, 1, 24).view(4, 6).requires_grad_() for _ in range(4)]
        mine, eagers = compiled(*leaves[:2]), function(*leaves[2:])
        torch.testing.assert_close(mine, eagers)
        (mine[0][0].sum() + mine[1]).backward()
        (eagers[0][0].sum() + eagers[1]).backward()
        torch.testing.assert_close([leaf.grad for leaf in leaves[:2]], [leaf.grad for leaf in leaves[2:]])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.usefixtures("no_cache")  # the first call finds no backward
def test_hooks_for_saved_tensors_see_one_call(measured: list[Times]) -> None:
    compiled = _compiled(lambda x: (x.sin() * x).exp())
    x = torch.linspace(-1, 1, 24).requires_grad_()
    compiled(x).sum().backward()
    packed: list[int] = []
    for _ in range(3):
        seen: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):  # type: ignore[misc]
            compiled(x).sum().backward()
        packed.append(len(seen))
    assert packed[0] == packed[1] == packed[2]
    assert not measured


def test_a_checkpointed_region_runs_one_way_both_times(measured: list[Times]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w).sin() * x

    compiled = _compiled(function)
    mine, eagers = (torch.full((4, 4), 0.5).requires_grad_() for _ in range(2))
    x = torch.randn(4, 4)
    for _ in range(3):
        checkpointed = checkpoint(compiled, x, mine, use_reentrant=False)
        (checkpointed + compiled(x, mine)).sum().backward()
        (function(x, eagers) + function(x, eagers)).sum().backward()
        torch.testing.assert_close(mine.grad, eagers.grad)


def test_a_gradient_that_is_no_number_when_measured_does_not_reach_the_caller() -> None:
    """The gradient that measuring asks for is not the one the caller will."""
    compiled = _compiled(lambda x: (x * 0).sqrt() * x)
    compiled(torch.ones(2).requires_grad_()).sum().backward()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        result = compiled(torch.ones(2).requires_grad_())
    assert torch.equal(result, torch.zeros(2))


def test_what_measuring_raises_does_not_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[None] = []

    def failing(compiled: Callable[[], object], eager: Callable[[], object]) -> Times:
        tried.append(None)
        raise ValueError("no times today")

    monkeypatch.setattr(adaptive, "compare", failing)
    compiled = _compiled(lambda x: x.sin() + 1)
    for _ in range(2):
        assert torch.allclose(compiled(torch.zeros(3)), torch.ones(3))
    assert len(tried) == 1


def test_a_profiler_sees_one_call(measured: list[Times]) -> None:
    compiled = _compiled(lambda x: x.sin() + 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        compiled(torch.zeros(3))
    assert not measured
    compiled(torch.zeros(3))
    assert len(measured) == 1


def test_what_runs_behind_is_waited_for() -> None:
    """A card's calls return before they are done: the time of the work counts, not that of the calls."""
    begun: list[float] = []

    def wait() -> None:
        time.sleep(sum(begun))
        begun.clear()

    slow, fast = (lambda: begun.append(0.004)), (lambda: begun.append(0.001))
    assert compare(slow, fast, wait).eager_is_faster
    assert not compare(fast, slow, wait).eager_is_faster
