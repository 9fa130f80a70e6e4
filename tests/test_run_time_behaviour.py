"""Compiled code under load: many threads, errors in the middle of a graph, thousands of calls, hundreds of models."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import BACKEND

MIB = 1 << 20


def _resident_bytes() -> int:
    """Resident memory with what the allocator could give back already given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _network(width: int = 48) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, width), nn.Softmax(-1))


@pytest.fixture
def raising_operator() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operator without a lowering that raises when the first element of its input is negative."""
    with torch.library._scoped_library("kiln_tests", "FRAGMENT") as library:
        library.define("checked_double(Tensor x) -> Tensor")

        def checked_double(x: Tensor) -> Tensor:
            if x.flatten()[0] < 0:
                raise ValueError("the first element is negative")
            return x * 2

        library.impl("checked_double", checked_double, "CPU")
        library.impl("checked_double", torch.empty_like, "Meta")
        yield torch.ops.kiln_tests.checked_double


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_eight_threads_call_one_compiled_model(compile_strictly: Callable[..., Any]) -> None:
    model = _network()
    compiled = compile_strictly(model)
    inputs = [torch.randn(32, 48) for _ in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        compiled(inputs[0])
    start = Barrier(8)

    def work(position: int) -> list[Tensor]:
        start.wait()
        with torch.no_grad():
            return [compiled(inputs[position]) for _ in range(200)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for got, want in zip(results, expected, strict=True):
        # Results are kept until here, so one thread writing into another's memory shows.
        for result in got:
            torch.testing.assert_close(result, want)


def test_eight_threads_train_copies_through_one_compiled_function(compile_strictly: Callable[..., Any]) -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x @ weight).square().sum()

    compiled = compile_strictly(loss)
    inputs = [(torch.randn(16, 24), torch.randn(24, 8, requires_grad=True)) for _ in range(8)]
    expected = [torch.autograd.grad(loss(x, w), w)[0] for x, w in inputs]
    torch.autograd.grad(compiled(*inputs[0]), inputs[0][1])
    start = Barrier(8)

    def work(position: int) -> list[Tensor]:
        x, weight = inputs[position]
        start.wait()
        return [torch.autograd.grad(compiled(x, weight), weight)[0] for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for got, want in zip(results, expected, strict=True):
        for result in got:
            torch.testing.assert_close(result, want)


@pytest.mark.parametrize("shape", [(3, 5), (300, 700), (1, 100_000), (100_000, 1)])
def test_results_do_not_depend_on_the_number_of_threads(
    shape: tuple[int, int], compile_strictly: Callable[..., Any], torch_threads: Callable[[int], None]
) -> None:
    if BACKEND != "kiln":
        pytest.skip("a promise of this compiler, not of every backend")

    def reductions(x: Tensor) -> tuple[Tensor, ...]:
        return x.softmax(-1), x.exp().sum(), x.sin().sum(0), x.var(1), x.tanh().mean((0, 1))

    compiled = compile_strictly(reductions)
    x = torch.randn(shape)
    results = []
    for threads in (1, 2, 3, 7):
        torch_threads(threads)
        results.append(compiled(x))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    for got, want in zip(results[0], reductions(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_an_operator_that_raises_gives_its_error_and_the_next_call_works(
    compile_strictly: Callable[..., Any], raising_operator: Callable[[Tensor], Tensor]
) -> None:
    def fn(x: Tensor) -> Tensor:
        before = torch.sin(x) + 1
        return torch.cos(raising_operator(before - 1 + x)) * before

    compiled = compile_strictly(fn)
    good, bad = torch.rand(64, 64), -torch.rand(64, 64)
    torch.testing.assert_close(compiled(good), fn(good))
    for _ in range(3):
        with pytest.raises(ValueError, match="the first element is negative"):
            compiled(bad)
        torch.testing.assert_close(compiled(good), fn(good))


def test_calls_that_raise_leave_no_memory_behind(
    compile_strictly: Callable[..., Any], raising_operator: Callable[[Tensor], Tensor]
) -> None:
    def fn(x: Tensor) -> Tensor:
        return raising_operator(torch.sin(x) @ torch.cos(x)) + x

    compiled = compile_strictly(fn)
    # sin(x) @ cos(x) starts with a negative number for this x.
    bad = torch.full((256, 256), -1.0)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ValueError, match="negative"):
                compiled(bad)

    fail(50)
    before = _resident_bytes()
    fail(400)
    # The product alone is 256 KiB: leaking it each time would cost 100 MiB.
    assert _resident_bytes() - before < 4 * MIB


def test_an_index_out_of_range_raises_and_the_next_call_works(compile_strictly: Callable[..., Any]) -> None:
    table = nn.Embedding(10, 16)

    def fn(ids: Tensor) -> Tensor:
        return torch.tanh(table(ids)).sum(-1)

    compiled = compile_strictly(fn)
    good, bad = torch.tensor([0, 3, 9]), torch.tensor([0, 10, 2])
    torch.testing.assert_close(compiled(good), fn(good))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(bad)
    torch.testing.assert_close(compiled(good), fn(good))


def test_ten_thousand_calls_leave_no_memory_behind(compile_strictly: Callable[..., Any]) -> None:
    compiled = compile_strictly(_network())
    x = torch.randn(16, 48)

    def call(times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                compiled(x)

    call(1000)
    before = _resident_bytes()
    call(10_000)
    # A tensor is more than 200 bytes with its storage, so one lost per call would be 2 MiB and more.
    assert _resident_bytes() - before < 1 * MIB


def test_two_thousand_training_steps_leave_no_memory_behind(compile_strictly: Callable[..., Any]) -> None:
    model = _network()
    compiled = compile_strictly(model)
    x = torch.randn(16, 48)

    def step(times: int) -> None:
        for _ in range(times):
            model.zero_grad()
            compiled(x).square().sum().backward()

    step(300)
    before = _resident_bytes()
    step(2000)
    # One saved activation (16 x 64 floats) lost per step would be 8 MiB.
    assert _resident_bytes() - before < 2 * MIB


# Runs in a process of its own, so that memory freed by other tests does not hide growth.
_DROPPED_MODELS = """
import sys
import torch
from torch import nn
from tests.test_run_time_behaviour import _resident_bytes

backend = sys.argv[1]
options = {"fallback": False} if backend == "kiln" else None

def compile_and_drop(width):
    # A width of its own makes each model's code differ from every other's.
    model = nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, width), nn.Softmax(-1))
    compiled = torch.compile(model, backend=backend, options=options, dynamic=False)
    with torch.no_grad():
        compiled(torch.randn(4, width))
    torch._dynamo.reset()

for width in range(10, 40):
    compile_and_drop(width)
before = _resident_bytes()
for width in range(40, 140):
    compile_and_drop(width)
print(_resident_bytes() - before)
"""


def _growth_over_100_models(backend: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _DROPPED_MODELS, backend],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_hundred_models_compiled_and_dropped_leave_only_what_torch_keeps() -> None:
    # Dynamo and AOTAutograd keep something for each model they saw; that is theirs, and measured here.
    of_torch = _growth_over_100_models("aot_eager")
    # Measured, a model costs 158 KiB in aot_eager and 176 here; keeping its compiled graph alive adds 120. The
    # 32 KiB a model allowed beyond torch's are a quarter of that, so a graph that is not freed fails the test.
    assert _growth_over_100_models(BACKEND) < of_torch + 100 * 32 * 1024
