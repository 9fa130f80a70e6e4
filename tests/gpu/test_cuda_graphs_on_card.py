"""``mode="reduce-overhead"`` on a card: replays of real CUDA graphs give eager's results, and hold what they must."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchkiln
from torchkiln.runtime.cuda_graphs.captured_call import CapturedCall

pytestmark = pytest.mark.card


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    torch._dynamo.reset()
    torchkiln.reset_stats()
    with torchkiln.settings(cache=False, fallback=False, adaptive=False):
        yield
    torch._dynamo.reset()
    torch.cuda.synchronize()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    """Every replay."""
    found: list[CapturedCall] = []
    replay = CapturedCall.replay

    def counted(self: CapturedCall, inputs: Any) -> list[Any]:
        found.append(self)
        return replay(self, inputs)

    monkeypatch.setattr(CapturedCall, "replay", counted)
    return found


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, mode="reduce-overhead", **options)


def close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax(F.layer_norm(x, x.shape[-1:], weight) @ x.t(), -1)


def test_inference_is_replayed(replays: list[CapturedCall]) -> None:
    run, weight = compiled(norm), torch.randn(256, device="cuda")
    for _ in range(6):
        x = torch.randn(512, 256, device="cuda")
        close(run(x, weight), norm(x, weight))
    assert len(replays) >= 3
    assert torchkiln.stats().without_cuda_graph == ()


def test_held_results_keep_their_values(replays: list[CapturedCall]) -> None:
    run, weight = compiled(norm), torch.randn(256, device="cuda")
    inputs = [torch.randn(512, 256, device="cuda") for _ in range(12)]
    held = [run(x, weight)[1:] for x in inputs]
    for x, found in zip(inputs, held, strict=True):
        close(found, norm(x, weight)[1:])
    assert len(set(replays)) == 4


@pytest.mark.parametrize("to_none", [True, False])
def test_training_follows_eager(replays: list[CapturedCall], to_none: bool) -> None:
    def results(wrap: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
        ).cuda()
        step = wrap(lambda x, target: F.cross_entropy(model(x), target))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for k in range(10):
            x, target = torch.randn(32, 3, 8, 8, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
            loss = step(x, target)
            optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            if k % 3 == 2:
                step(x * 2, target).backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(t.detach().float() for t in (*model.parameters(), *model.buffers()))]

    for mine, theirs in zip(results(compiled), results(lambda step: step), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    assert len(replays) >= 14
    assert torchkiln.stats().without_cuda_graph == ()


def test_each_size_is_captured(replays: list[CapturedCall]) -> None:
    run, weight = compiled(norm, dynamic=True), torch.randn(256, device="cuda")
    for _ in range(5):
        for rows in (32, 48, 512):
            x = torch.randn(rows, 256, device="cuda")
            close(run(x, weight), norm(x, weight))
    assert len(set(replays)) >= 3


def test_random_numbers_are_eagers(replays: list[CapturedCall]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.4) + torch.rand_like(x)

    run, x = compiled(function), torch.randn(64, 256, device="cuda")
    torch.manual_seed(5)
    expected = [function(x) for _ in range(6)]
    after = torch.rand(4, device="cuda")
    torch.manual_seed(5)
    for theirs in expected:
        torch.testing.assert_close(run(x), theirs)
    torch.testing.assert_close(torch.rand(4, device="cuda"), after)
    assert len(replays) >= 3


def test_attention_that_drops_weights_trains(replays: list[CapturedCall]) -> None:
    def loss(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 2, q, q, dropout_p=0.3).float().square().sum()

    run = compiled(loss)
    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16, requires_grad=True)

    def results(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        value = function(q)
        return [value.detach(), *torch.autograd.grad(value, q)]

    for _ in range(5):
        for mine, theirs in zip(results(run), results(loss), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_waiting_for_numbers_is_a_reason_and_right(replays: list[CapturedCall]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].exp() * 2

    run = compiled(function)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(4):
            x = torch.randn(100, device="cuda")
            close(run(x), function(x))
    assert replays == []
    assert len(torchkiln.stats().without_cuda_graph) == 1


def test_numbers_on_the_cpu_are_a_reason_and_right(replays: list[CapturedCall]) -> None:
    run = compiled(lambda x, s: x * s + 1)
    for _ in range(5):
        x, s = torch.randn(8, 64, device="cuda"), torch.randn(())
        close(run(x, s), x * s + 1)
    assert replays == []
    assert "CPU" in torchkiln.stats().without_cuda_graph[0].reason


def test_calls_on_several_streams_are_right(replays: list[CapturedCall]) -> None:
    run, weight, other = compiled(norm), torch.randn(256, device="cuda"), torch.cuda.Stream()
    for k in range(10):
        x = torch.randn(512, 256, device="cuda")
        stream = other if k % 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = run(x, weight)
        torch.cuda.current_stream().wait_stream(stream)
        close(found, norm(x, weight))
        torch.cuda.synchronize()
    assert len(replays) >= 2


def test_a_users_capture_takes_the_launches(replays: list[CapturedCall]) -> None:
    run, x, weight = compiled(norm), torch.randn(512, 256, device="cuda"), torch.randn(256, device="cuda")
    for _ in range(4):
        run(x, weight)
    torch.cuda.synchronize()
    before, graph = len(replays), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x, weight)
    assert len(replays) == before
    x.copy_(torch.randn_like(x))
    graph.replay()
    close(result, norm(x, weight))


def test_captures_give_their_memory_back() -> None:
    norm(torch.randn(512, 256, device="cuda"), torch.randn(256, device="cuda"))  # cuBLAS takes memory to work in
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    run, weight = compiled(norm), torch.randn(256, device="cuda")
    for _ in range(5):
        run(torch.randn(512, 256, device="cuda"), weight)
    del run, weight
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    # What cuBLAS works in on the stream of captures stays: up to 32 MiB.
    assert torch.cuda.memory_allocated() - before <= 33 << 20


def test_a_replay_waits_for_nothing(replays: list[CapturedCall]) -> None:
    run, x, weight = compiled(norm), torch.randn(512, 256, device="cuda"), torch.randn(256, device="cuda")
    for _ in range(4):
        run(x, weight)
    before = len(replays)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(replays) == before + 1


def test_threads_that_call_at_the_same_time_get_their_own_results(replays: list[CapturedCall]) -> None:
    run, weight = compiled(norm), torch.randn(256, device="cuda")
    for _ in range(4):
        run(torch.randn(512, 256, device="cuda"), weight)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def call() -> None:
        for _ in range(20):
            x = torch.randn(512, 256, device="cuda")
            found.append((run(x, weight)[:8].clone(), norm(x, weight)[:8]))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for mine, theirs in found:
        close(mine, theirs)
    assert len(replays) > 10


def test_functions_from_the_cache_are_replayed(replays: list[CapturedCall], tmp_path: Any) -> None:
    weight = torch.randn(256, device="cuda")
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path)):
        for _ in range(2):
            torch._dynamo.reset()
            replays.clear()
            run = compiled(norm)
            for _ in range(5):
                x = torch.randn(512, 256, device="cuda")
                close(run(x, weight), norm(x, weight))
            assert len(replays) >= 2
    assert torchkiln.stats().cache.hits > 0
