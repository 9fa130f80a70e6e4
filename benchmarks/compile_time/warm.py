"""Seconds to a first result in a process that finds its caches filled.

A first process fills them, a second one is measured; ``eager``, which is Dynamo alone, has none. The clock runs from
the call of ``torch.compile``, where precompiled functions are loaded, to the end of the first call or training step.
The run itself, a third call, is taken off: the second one of ours times a training step. ``CPU`` are seconds that all
threads of the process had a processor.

All compile one function that calls the model and returns a plain dictionary, with guards on tensors and global state
alone: torch 2.13 cannot load precompiled functions otherwise (docs/cache.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compile_time.models import Job, built, step_of

MODELS = ("bert", "swin")
BASE = "eager"
PRECOMPILED = "kiln, precompiled"
WAYS = (BASE, "kiln", PRECOMPILED, "inductor")


@dataclass(frozen=True)
class WarmStart:
    model: str
    way: str
    job: Job
    wall: float
    processor: float


def environment(way: str) -> dict[str, str]:
    return {"TORCH_CACHING_PRECOMPILE": "1" if way == PRECOMPILED else "0"}


def forward(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(model(**inputs).items())


def measure(model: str, way: str, job: Job) -> WarmStart:
    """First and third call in this process; meant to be called once in a process, after one that filled the caches."""
    import torch

    module, inputs = built(model, job)
    backend = way.partition(",")[0]
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_portable_guards_unsafe}
    if backend == "kiln":
        options["fallback"] = False
    times = [_now()]
    compiled = torch.compile(forward, backend=backend, options=options)
    step = step_of(lambda **given: compiled(module, given), inputs, job)
    for _ in range(3):
        step()
        times.append(_now())
    if way == PRECOMPILED:
        torch.compiler.save_cache_artifacts()
    wall, processor = (first - start - (third - second) for start, first, second, third in zip(*times, strict=True))
    return WarmStart(model, way, job, wall, processor)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def show(console: Console, job: Job, runs: Sequence[WarmStart]) -> None:
    """The best run of each way, and its ratio to ``BASE``."""
    table = Table(title=f"{job}: first result with filled caches, without the run itself")
    table.add_column("model")
    table.add_column("backend")
    for heading in ("wall, s", f"× {BASE}", "CPU, s", f"× {BASE}"):
        table.add_column(heading, justify="right")
    for model in dict.fromkeys(run.model for run in runs):
        best = {run.way: run for run in sorted(runs, key=lambda run: -run.processor) if run.model == model}
        base = best.get(BASE)
        for way in (way for way in WAYS if way in best):
            run = best[way]
            ratios = ("-", "-") if base is None else (run.wall / base.wall, run.processor / base.processor)
            wall, processor = (ratio if isinstance(ratio, str) else f"{ratio:.2f}" for ratio in ratios)
            table.add_row(model, way, f"{run.wall:.2f}", wall, f"{run.processor:.2f}", processor)
        table.add_section()
    console.print(table)
