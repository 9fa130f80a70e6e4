"""``mode="reduce-overhead"`` on an emulated card: what is captured and replayed, and that results are eager's."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkiln
from tests.gpu.emulated_captures import EmulatedCaptures
from tests.gpu.emulated_card import EmulatedDriver, emulated
from torchkiln.runtime.cuda_graphs import replays


@pytest.fixture(autouse=True)
def driver() -> Iterator[EmulatedDriver]:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    with emulated() as found, torchkiln.settings(cache=False, fallback=False, adaptive=False):
        yield found
    assert found.guards == []
    torch._dynamo.reset()


@pytest.fixture
def graphs(driver: EmulatedDriver) -> EmulatedCaptures:
    return driver.graphs


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, mode="reduce-overhead", **options)


def reasons() -> list[str]:
    return [f"{found.graph}: {found.reason}" for found in torchkiln.stats().without_cuda_graph]


def apart(count: int, *sizes: int) -> list[torch.Tensor]:
    """Inputs that all lie at other addresses."""
    return [torch.randn(*sizes) for _ in range(count)]


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.tanh(x) @ w + 1, -1).square() * 2


def test_calls_are_replayed_with_new_inputs_after_two_without(graphs: EmulatedCaptures) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    for x in apart(6, 8, 32):
        torch.testing.assert_close(run(x, w), layer(x, w))
    assert (graphs.captured, graphs.replayed) == (1, 4)
    assert reasons() == []


def test_the_default_mode_captures_nothing(graphs: EmulatedCaptures) -> None:
    run, w = torch.compile(layer, backend="kiln", fullgraph=True), torch.randn(32, 64)
    for _ in range(4):
        run(torch.randn(8, 32), w)
    assert graphs.captured == 0


def test_results_that_are_held_are_never_overwritten(
    graphs: EmulatedCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchkiln.runtime.cuda_graphs.captured_call.SMALL", 0)
    run, w = compiled(layer), torch.randn(32, 64)
    held, expected = [], []
    for k, x in enumerate(apart(12, 8, 32)):
        held.append(run(x, w)[1:] if k % 2 else run(x, w).t())  # views hold the memory, too
        expected.append(layer(x, w)[1:] if k % 2 else layer(x, w).t())
    for mine, theirs in zip(held, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert graphs.captured == replays.MOST_FOR_ONE_CALL
    assert reasons() == [
        "inference: the results of 4 earlier calls are held; while they are, calls run without"
    ]
    storage = held[-1].untyped_storage()
    del held[:-1]
    before = graphs.replayed
    x = torch.randn(8, 32)
    torch.testing.assert_close(run(x, w), layer(x, w))
    assert graphs.replayed == before + 1
    assert graphs.captured == replays.MOST_FOR_ONE_CALL
    assert storage.nbytes() > 0


def test_a_storage_alone_holds_a_result(graphs: EmulatedCaptures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchkiln.runtime.cuda_graphs.captured_call.SMALL", 0)
    run, w = compiled(layer), torch.randn(32, 64)
    for x in apart(5, 8, 32):
        storage = run(x, w).untyped_storage()
    assert (graphs.captured, graphs.replayed) == (2, 3)
    run(torch.randn(8, 32), w)
    found = torch.empty(0).set_(storage, 0, (8, 64), (64, 1))  # type: ignore[call-overload]
    torch.testing.assert_close(found, layer(x, w))


def test_small_results_are_copies_and_need_one_capture(graphs: EmulatedCaptures) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    for x, found in [(x, run(x, w)) for x in apart(8, 8, 32)]:
        torch.testing.assert_close(found, layer(x, w))
    assert graphs.captured == 1


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 8))


def _train(
    step: Callable[..., torch.Tensor], model: nn.Module, steps: int, *, to_none: bool = True, early: bool = True
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for k in range(steps):
        x, target = torch.randn(16, 24), torch.randint(0, 8, (16,))
        if early:
            optimizer.zero_grad(set_to_none=to_none)
        loss = step(x, target)
        if not early:
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        if k % 3 == 2:  # a second backward adds to gradients that are held
            step(x * 2, target).backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(("to_none", "early"), [(True, True), (True, False), (False, True)])
def test_training_follows_eager(graphs: EmulatedCaptures, to_none: bool, early: bool) -> None:
    def results(wrap: Callable[..., Any]) -> list[torch.Tensor]:
        model = _model()
        step = wrap(lambda x, target: F.cross_entropy(model(x), target))
        return _train(step, model, 10, to_none=to_none, early=early)

    for mine, theirs in zip(results(compiled), results(lambda step: step), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert reasons() == []
    assert graphs.captured <= 4  # forward and backward, and again where gradients are held
    assert graphs.replayed >= 18


def test_parameters_are_read_in_place_and_saved_values_stay_until_backward(graphs: EmulatedCaptures) -> None:
    model = _model()
    run = compiled(lambda x: model(x).square().sum(-1))

    def gradients(step: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        losses = [step(x) for x in inputs]  # all wait for backward
        for k, loss in enumerate(losses):
            (loss.sum() * (k + 1)).backward()
        found = [loss.detach() for loss in losses]
        return found + [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def compare(*inputs: torch.Tensor) -> None:
        expected = gradients(lambda x: model(x).square().sum(-1), *inputs)
        for mine, theirs in zip(gradients(run, *inputs), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)

    *inputs, x, y = apart(7, 16, 24)
    for given in inputs:
        compare(given)
    before = graphs.captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    compare(x)
    assert graphs.captured == before > 0
    for _ in range(3):
        compare(x, y)
    assert graphs.captured > before
    assert reasons() == []


def test_a_parameter_that_moves_is_captured_again_and_then_copied(graphs: EmulatedCaptures) -> None:
    model = nn.Linear(16, 32).requires_grad_(False)
    run = compiled(lambda x: torch.sigmoid(model(x)) * 2)
    kept = []
    with torch.no_grad():
        for k, x in enumerate(apart(16, 4, 16)):
            if k % 2:
                kept.append(model.weight.data)
                model.weight.data = torch.randn(32, 16)
            torch.testing.assert_close(run(x), torch.sigmoid(model(x)) * 2)
    assert 2 <= graphs.captured <= 2 + replays.MOST_MOVES
    assert graphs.replayed >= 9


def test_each_size_is_captured(graphs: EmulatedCaptures) -> None:
    run, w = compiled(layer, dynamic=True), torch.randn(32, 64)
    for inputs in zip(apart(5, 3, 32), apart(5, 8, 32), apart(5, 21, 32), strict=True):
        for x in inputs:
            torch.testing.assert_close(run(x, w), layer(x, w))
    assert torchkiln.stats().graphs == 1
    assert graphs.captured == 3
    assert graphs.replayed == 9


def test_captures_make_way_for_those_of_other_sizes(
    graphs: EmulatedCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "MOST_CAPTURES", 2)
    monkeypatch.setattr(replays, "MOST_REPLACED", 5)
    run = compiled(lambda x: x.exp() + 1, dynamic=True)
    for inputs in zip(apart(6, 3, 32), apart(6, 8, 32), apart(6, 21, 32), strict=True):
        for x in inputs:
            torch.testing.assert_close(run(x), x.exp() + 1)
    assert graphs.captured == 2 + 5
    assert reasons() == ["inference: it is called in more than 2 ways in turns; other calls run without"]


def test_buffers_are_written_to_once_a_call(graphs: EmulatedCaptures) -> None:
    def results(wrap: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        step = wrap(lambda x: model(x).mean((1, 2, 3)))
        found = []
        for _ in range(5):
            step(torch.randn(2, 3, 8, 8)).sum().backward()
            found += [buffer.clone() for buffer in model.buffers()]
        return [*found, *(p.grad for p in model.parameters() if p.grad is not None)]

    for mine, theirs in zip(results(compiled), results(lambda step: step), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert reasons() == []
    assert graphs.captured >= 2


def test_results_that_share_memory_share_it_in_replays(graphs: EmulatedCaptures) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y, y[1:], x[2:], x.cos()

    run = compiled(function)
    for x in apart(5, 6, 4):
        y, part, of_input, other = run(x)
        for mine, theirs in zip((y, part, of_input, other), function(x), strict=True):
            torch.testing.assert_close(mine, theirs)
        y.zero_()
        assert part.abs().sum() == 0
        x.zero_()
        assert of_input.abs().sum() == 0
        del y, part, of_input, other
    assert graphs.captured == 1


def test_numbers_that_are_read_from_the_card_are_a_reason(
    graphs: EmulatedCaptures, caplog: pytest.LogCaptureFixture
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        torch._check(count <= x.numel())
        return torch.zeros(count) + x.sum()

    run = compiled(function)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), caplog.at_level(logging.WARNING, "torchkiln"):
        for _ in range(4):
            x = torch.randn(50)
            torch.testing.assert_close(run(x), function(x))
    assert graphs.captured == 0
    (reason,) = reasons()
    assert reason.startswith("inference: the CPU waits for a number that the card computes")
    assert sum("runs without CUDA graphs" in record.getMessage() for record in caplog.records) == 1
    assert "without CUDA graph   1" in str(torchkiln.stats())


def _writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.sum(-1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_writes, "it writes to its input"),
        (lambda x: x[x.abs() > 0.5].exp(), "the CPU waits for what"),
        (lambda x: torch.multinomial(x.abs() + 1, 2), "aten.multinomial.default may draw random numbers on the CPU"),
        (lambda x: torch.linalg.inv(x @ x.t() + 10 * torch.eye(4)), "it is not known whether aten.linalg_inv_ex"),
    ],
)
def test_what_cannot_be_captured_is_a_reason(
    graphs: EmulatedCaptures, function: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    run = compiled(function)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(4):
            x = torch.randn(4, 8)
            again = x.clone()
            torch.manual_seed(0)
            found = run(x)
            torch.manual_seed(0)
            torch.testing.assert_close(found, function(again))
            torch.testing.assert_close(x, again)
    assert graphs.captured == 0
    assert any(reason in found for found in reasons())


def test_an_input_on_the_cpu_is_a_reason(graphs: EmulatedCaptures) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    graphs.elsewhere.append(w)
    for _ in range(4):
        x = torch.randn(8, 32)
        torch.testing.assert_close(run(x, w), layer(x, w))
    assert graphs.captured == 0
    assert reasons() == ["inference: its input 1 is on the CPU"]


def test_a_capture_that_fails_is_a_reason_and_the_call_has_its_result(graphs: EmulatedCaptures) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    graphs.failing = True
    for _ in range(5):
        x = torch.randn(8, 32)
        torch.testing.assert_close(run(x, w), layer(x, w))
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert reasons() == [f"inference: its launches could not be captured: {reason}"]


def test_calls_on_another_stream_run_without(driver: EmulatedDriver) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    for k, x in enumerate(apart(8, 8, 32)):
        driver.stream = 0x5678 + k % 2
        torch.testing.assert_close(run(x, w), layer(x, w))
    assert (driver.graphs.captured, driver.graphs.replayed) == (1, 2)
    assert len(reasons()) == 1
    assert "several streams" in reasons()[0]


def test_a_call_inside_the_users_own_capture_is_part_of_that(driver: EmulatedDriver) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    for _ in range(4):
        run(torch.randn(8, 32), w)
    before, launched = driver.graphs.replayed, len(driver.launches)
    driver.capturing = True
    x = torch.randn(8, 32)
    torch.testing.assert_close(run(x, w), layer(x, w))
    assert driver.graphs.replayed == before
    assert len(driver.launches) > launched


def test_random_numbers_differ_from_replay_to_replay(graphs: EmulatedCaptures) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) * 2

    run = compiled(function, options=None)
    masks = []
    for _ in range(6):
        masks.append(run(torch.ones(64)))
    assert graphs.replayed == 4
    assert len({tuple(mask.tolist()) for mask in masks}) == 6


def test_intermediate_values_of_all_captures_on_a_stream_share_memory(graphs: EmulatedCaptures) -> None:
    first = compiled(lambda x: torch.softmax(x @ x, -1) @ x)
    second = compiled(lambda x: torch.sigmoid(x @ x) @ x + 1)
    x = torch.randn(64, 64)
    for _ in range(4):
        first(x)
        second(x)
    memory = graphs.memory()
    scratch = memory.scratch(1, torch.device("cpu"))
    scratch.zero_()
    for run in (first, second):
        run(x)
        assert scratch.count_nonzero() > 0
        scratch.zero_()
    del run
    torch.testing.assert_close(first(x), torch.softmax(x @ x, -1) @ x)
    del scratch, first, second
    torch._dynamo.reset()
    gc.collect()
    assert memory.owned == set()
    assert memory._scratch is not None
    assert memory._scratch() is None  # nobody needs it any more


def test_replays_serve_inference_mode_and_other_threads(graphs: EmulatedCaptures) -> None:
    run, w = compiled(layer), torch.randn(32, 64)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def call() -> None:
        x = torch.randn(8, 32)
        found.append((run(x, w), layer(x, w)))

    for _ in range(4):
        call()
    thread = threading.Thread(target=call)  # one at a time: the emulated card knows no threads
    thread.start()
    thread.join()
    with torch.inference_mode():
        for _ in range(4):
            call()
        assert found[-1][0].is_inference()
    call()
    for mine, theirs in found:
        torch.testing.assert_close(mine, theirs)
    assert graphs.replayed >= 4
