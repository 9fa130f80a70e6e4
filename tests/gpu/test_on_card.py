"""What only a card shows: streams, CUDA graphs, threads, several cards, memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchkiln
from torchkiln.native.tensor_keys import keys_of, plain_keys
from torchkiln.runtime.plain_tensors import is_plain
from torchkiln.target import capture_target

pytestmark = pytest.mark.card


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    torch._dynamo.reset()
    with torchkiln.settings(cache=False, fallback=False):
        yield
    torch._dynamo.reset()
    torch.cuda.synchronize()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="kiln", fullgraph=True, **options)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.softmax(F.layer_norm(x, x.shape[-1:], weight) @ x.t(), -1)


def _inputs(device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(512, 512, device=device), torch.randn(512, device=device)


def test_the_target_describes_the_card() -> None:
    torch.zeros(1, device="cuda")
    card = capture_target(torchkiln.Settings()).card
    assert card is not None
    assert card.capability == torch.cuda.get_device_capability()
    assert card.processors > 0
    assert card.shared_bytes >= 48 << 10
    assert not card.emulated


def test_tensors_of_a_card_are_plain_and_their_marked_views_are_not() -> None:
    x = torch.randn(4, device="cuda")
    assert is_plain(x)
    assert not is_plain(torch._neg_view(x))
    cpu = torch.zeros(4)
    assert keys_of(x) & ~plain_keys().devices == keys_of(cpu) & ~plain_keys().devices


def test_a_call_waits_for_nothing() -> None:
    run, inputs = compiled(norm), _inputs()
    run(*inputs)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_kernels_run_on_the_stream_of_the_caller() -> None:
    run, (x, weight) = compiled(norm), _inputs()
    run(x, weight)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(0.5)
        result = run(x, weight)
        event = torch.cuda.Event()
        event.record()
    torch.cuda.current_stream().wait_event(event)
    torch.testing.assert_close(result, norm(torch.full_like(x, 0.5), weight))


def test_a_cuda_graph_of_an_inference_replays() -> None:
    run, (x, weight) = compiled(norm), _inputs()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x, weight)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(result, norm(x, weight), rtol=1e-3, atol=1e-4)


def test_a_cuda_graph_of_a_step_replays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).cuda()
    run, x = compiled(lambda x: model(x).square().mean()), torch.randn(32, 64, device="cuda")

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=False)
        loss: torch.Tensor = run(x)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    found = [loss.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    eager = model(x).square().mean()
    eager.backward()
    expected = [eager.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_cuda_graph_outlives_the_compiled_code_it_captured() -> None:
    run, (x, weight) = compiled(norm), _inputs()
    run(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(x, weight)
    del run
    torch._dynamo.reset()
    gc.collect()
    graph.replay()
    torch.testing.assert_close(result, norm(x, weight), rtol=1e-3, atol=1e-4)


def test_compiled_code_may_go_while_its_kernels_wait() -> None:
    run, (x, weight) = compiled(norm), _inputs()
    run(x, weight)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    result = run(x, weight)
    del run
    torch._dynamo.reset()
    gc.collect()
    torch.testing.assert_close(result, norm(x, weight), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_drops_what_eager_drops(name: str, dropout: float) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, dropout_p=dropout).float().square().sum()

    inputs = [torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]

    def results(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        with sdpa_kernel(getattr(SDPBackend, name)):
            value = function(*inputs)
        return [value.detach(), *torch.autograd.grad(value, inputs)]

    try:
        expected = results(loss)
    except RuntimeError as error:
        pytest.skip(f"torch has no such attention here: {error}")
    for mine, theirs in zip(results(compiled(loss)), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_a_thread_that_never_used_the_card_can_call() -> None:
    run, inputs = compiled(norm), _inputs()
    expected, found = run(*inputs), []
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(run(*inputs)))
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_a_graph_runs_on_the_card_of_its_tensors() -> None:
    run = compiled(norm)
    for device in ("cuda:1", "cuda:0"):
        inputs = _inputs(device)
        torch.testing.assert_close(run(*inputs), norm(*inputs), rtol=1e-3, atol=1e-4)
        assert torch.cuda.current_device() == 0


def test_numbers_on_the_cpu_take_part() -> None:
    def function(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * s + 1, s * 2, (x.sum() * s).cpu()

    x, s = torch.randn(8, 64, device="cuda"), torch.tensor(1.5)
    for mine, theirs in zip(compiled(function)(x, s), function(x, s), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_tensors_of_both_devices_take_part() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(x + y.cuda(), -1), (y.exp() + x.cpu()).sum(0)

    x, y = torch.randn(8, 64, device="cuda"), torch.randn(8, 64)
    for mine, theirs in zip(compiled(function)(x, y), function(x, y), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_input_elsewhere_than_compiled_for_is_compiled_again() -> None:
    run = compiled(lambda x: x.exp() + 1)
    for device in ("cuda", "cpu"):
        x = torch.randn(100, device=device)
        torch.testing.assert_close(run(x), x.exp() + 1)


def test_memory_that_is_not_aligned_is_copied() -> None:
    run, memory = compiled(lambda x: x * 2 + 1), torch.randn(65, device="cuda")
    for x in (memory[:64], memory[1:]):
        torch.testing.assert_close(run(x), x * 2 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_memory_that_is_not_aligned_is_written_to(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x.index_fill_(0, torch.arange(3, device="cuda"), 1)
        return x.add_(1).sum()

    run = compiled(function)
    mine = torch.arange(8200, device="cuda").remainder(11).to(dtype)
    for begin in (0, 1, 3, 5):
        theirs = mine.clone()
        torch.testing.assert_close(run(mine[begin : begin + 8192]), function(theirs[begin : begin + 8192]))
        assert torch.equal(mine, theirs)


def _triton() -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tests.passes import kernels_in_triton

    return kernels_in_triton


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_in_triton_run_between_those_of_ours(dynamic: bool) -> None:
    kernels = _triton()

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = kernels.add(x.exp(), y)
        kept = total.clone()
        return torch.softmax(kernels.double(total), -1), kept + kernels.tuned(y)

    run = compiled(function, dynamic=dynamic)
    for rows in (16, 40, 7) if dynamic else (16,):
        inputs = [torch.randn(rows, 100, device="cuda") for _ in range(2)]
        torch.testing.assert_close(run(*inputs), function(*inputs))
    assert any("triton_kernel" in name for name in torchkiln.stats().extern_calls)


def test_a_kernel_in_triton_writes_to_an_input_on_the_stream_of_the_caller() -> None:
    kernels = _triton()
    run = compiled(lambda x: kernels.double(x).exp())
    mine = torch.ones(1 << 20, device="cuda")
    run(mine)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        mine.fill_(3)
        result = run(mine)
    stream.synchronize()
    torch.testing.assert_close(mine, torch.full_like(mine, 6))
    torch.testing.assert_close(result, torch.full_like(mine, 6).exp())


def test_a_card_without_memory_raises_torchs_error_and_stays_usable() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm((x[:, None] - x[None]).cos(), x[:, None]).sum()

    run = compiled(function, dynamic=True)
    with pytest.raises(torch.OutOfMemoryError):
        run(torch.zeros(1 << 20, device="cuda"))
    x = torch.randn(100, device="cuda")
    torch.testing.assert_close(run(x), function(x), rtol=1e-3, atol=1e-3)


def test_a_call_leaves_no_memory_behind() -> None:
    run, inputs = compiled(norm), _inputs()
    for _ in range(2):
        run(*inputs)
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        run(*inputs)
    assert torch.cuda.memory_allocated() == before


def test_what_is_kept_on_disk_runs_again(tmp_path: Any) -> None:
    x, weight = _inputs()
    expected = norm(x, weight)
    with torchkiln.settings(cache=True, cache_dir=str(tmp_path)):
        for _ in range(2):
            torch._dynamo.reset()
            torch.testing.assert_close(compiled(norm)(x, weight), expected, rtol=1e-3, atol=1e-4)
    assert torchkiln.stats().cache.hits > 0


def test_random_numbers_are_eagers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.4) + torch.rand_like(x)

    run, x = compiled(function), torch.randn(64, 256, device="cuda")
    torch.manual_seed(5)
    expected = [function(x), function(x)]
    torch.manual_seed(5)
    for theirs in expected:
        torch.testing.assert_close(run(x), theirs)
