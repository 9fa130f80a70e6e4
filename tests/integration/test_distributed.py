"""DistributedDataParallel with several buckets of gradients, each of which Dynamo makes a graph of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import torchkiln
from torchkiln import compiler, recorder
from torchkiln.errors import FallbackWarning
from torchkiln.stats import Stats

_LAYERS = 3


class Layers(nn.Module):
    """3 MiB of weights: with buckets of 1 MiB, three of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(512, 512) for _ in range(_LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@contextmanager
def _group(folder: Path, *, rank: int, processes: int) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _gradients(model: DistributedDataParallel, run: Callable[..., Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(dist.get_rank())  # other data in each process: gradients are right only if they are averaged
    for _ in range(2):
        model.zero_grad()
        run(torch.randn(8, 512)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def _compare(**options: object) -> None:
    """Train compiled and eagerly, in buckets of 1 MiB, and compare gradients and then inference."""
    torch.manual_seed(0)
    eager = DistributedDataParallel(Layers(), bucket_cap_mb=1)
    model = DistributedDataParallel(copy.deepcopy(eager.module), bucket_cap_mb=1)
    compiled = torch.compile(model, backend="kiln", options=options)
    torch.testing.assert_close(_gradients(model, compiled), _gradients(eager, eager))
    x = torch.randn(8, 512)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), eager(x))


def _graphs(stats: Stats) -> int:
    """Those that run at each call, without those that prepare weights."""
    return stats.graphs - sum(graph.kind == "weights" for graph in stats.by_graph)


def _one_of_two_processes(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with _group(folder, rank=rank, processes=2):
        _compare(fallback=False)
    stats = torchkiln.stats()
    assert stats.fallbacks == ()
    assert _graphs(stats) == 3 * _LAYERS  # forward, backward and inference of each bucket
    assert counters["aot_autograd"]["ok"] == counters["aot_autograd"]["total"] == 2 * _LAYERS


def test_gradients_of_two_processes_are_those_of_eager(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_one_of_two_processes, (tmp_path,), nprocs=2)


def test_buckets_load_their_code_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is traced: Dynamo asks AOTAutograd for the strides of its results."""
    monkeypatch.setattr(recorder, "_listeners", ())
    with _group(tmp_path, rank=0, processes=1), torchkiln.settings(cache=True, cache_dir=str(tmp_path / "cache")):
        for wanted in (True, False):
            torch._dynamo.reset()
            torchkiln.reset_stats()
            _compare(fallback=False, adaptive=False)
            assert ("codegen" in torchkiln.stats().seconds) == wanted


@pytest.mark.usefixtures("no_cache")  # a stage is made to fail
@pytest.mark.parametrize("failing", [1, 2])
def test_a_bucket_that_cannot_be_compiled_runs_eagerly_beside_the_others(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, calls = compiler.trace_with_autograd, 0

    def fail_once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("not this bucket")
        return trace(*arguments, **options)

    monkeypatch.setattr(compiler, "trace_with_autograd", fail_once)
    before = torchkiln.stats()
    with _group(tmp_path, rank=0, processes=1), pytest.warns(FallbackWarning, match="not this bucket"):
        _compare(fallback=True, adaptive=False)
    after = torchkiln.stats()
    assert len(after.fallbacks) - len(before.fallbacks) == 1
    assert _graphs(after) - _graphs(before) == 3 * _LAYERS - 2
