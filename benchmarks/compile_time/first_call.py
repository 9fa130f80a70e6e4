"""First-call seconds of BERT-base for several backends, from the clock on the wall.

The clock starts at the first call of the compiled model, with torch imported and the model built, so it includes
importing the backend itself. ``eager`` is Dynamo alone, ``aot_eager`` Dynamo and AOTAutograd alone: what any backend
of ``torch.compile`` costs at least.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compile_time.models import Job, built, step_of

MODEL = "bert"
BACKENDS = ("eager", "aot_eager", "inductor", "kiln")
BASE = "aot_eager"


@dataclass(frozen=True)
class FirstCall:
    backend: str
    job: Job
    first: float
    second: float


def measure(backend: str, job: Job) -> FirstCall:
    """First and second call in this process; meant to be called once in a process."""
    import torch

    model, inputs = built(MODEL, job)
    options: dict[str, Any] | None = {"fallback": False} if backend == "kiln" else None
    step = step_of(torch.compile(model, backend=backend, options=options), inputs, job)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return FirstCall(backend, job, seconds[0], seconds[1])


def show(console: Console, job: Job, runs: list[FirstCall]) -> None:
    """The best run of each backend and its ratio to ``BASE``."""
    best: dict[str, FirstCall] = {}
    for run in sorted(runs, key=lambda run: -run.first):
        best[run.backend] = run
    table = Table(title=f"BERT-base, sequence 128, {job}: first call")
    table.add_column("backend")
    for heading in ("first call, s", f"× {BASE}", "second call, ms"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(run.backend for run in runs):
        run = best[name]
        ratio = f"{run.first / best[BASE].first:.2f}" if BASE in best else "-"
        table.add_row(name, f"{run.first:.2f}", ratio, f"{run.second * 1e3:.1f}")
    console.print(table)
