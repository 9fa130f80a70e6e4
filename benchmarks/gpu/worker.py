"""One cell in a process of its own: ``python -m benchmarks.gpu.worker models bert training kiln``; a line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends, register_backend

from benchmarks.gpu.entries import BACKENDS, MODELS, SMALL, loss_of

_MIB = 1 << 20
_STEPS_FOR_S = 2.0


def measure(table: str, name: str, job: str, backend: str) -> dict[str, Any]:
    """First call in seconds, milliseconds a step, and the most MiB in use after the first call."""
    if "kiln" not in list_backends(exclude_tags=()):
        from torchkiln.backend import kiln

        register_backend(kiln, name="kiln")
    torch.manual_seed(0)
    entry = {"models": MODELS, "launches": SMALL}[table][name]
    model, arguments = entry.make()
    model.train(job == "training")
    options = BACKENDS[backend]
    run = model if options is None else torch.compile(model, **options)

    def inference() -> None:
        with torch.no_grad():
            run(**arguments)

    def training() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(run(**arguments)).backward()

    step = training if job == "training" else inference
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = _milliseconds(step)
    peak = torch.cuda.max_memory_allocated() / _MIB
    found: dict[str, Any] = {"first s": first, "ms": statistics.median(times), "least ms": min(times), "MiB": peak}
    if backend.startswith("kiln"):
        import torchkiln

        stats = torchkiln.stats()
        found |= {"fallbacks": [str(f) for f in stats.fallbacks], "kernels": stats.kernels, "graphs": stats.graphs}
        found["without CUDA graph"] = [str(f) for f in stats.without_cuda_graph]
        found["extern"] = dict(stats.extern_calls)
        found["stages"] = {stage: round(seconds, 2) for stage, seconds in stats.seconds.items() if seconds > 0.05}
    return found


def _milliseconds(step: Callable[[], None]) -> list[float]:
    """Of rounds that each take at least a fifteenth of the time, by the clock: launches count where they dominate."""
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    once = time.perf_counter() - start
    calls = max(1, int(_STEPS_FOR_S / 15 / max(once, 1e-5)))
    times = []
    end = time.perf_counter() + _STEPS_FOR_S
    while time.perf_counter() < end or len(times) < 5:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e3)
    return times


if __name__ == "__main__":
    print("RESULT " + json.dumps(measure(*sys.argv[1:5])), flush=True)
