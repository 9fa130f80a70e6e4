"""Seconds of every stage of ours, beside what Dynamo and AOTAutograd take in the same compilation.

Times are those the compiling thread had a processor, so that a busy machine changes them less. What is left of the
first call without our stages (importing the compiler is one) and the run itself (a second call) counts as Dynamo's and
AOTAutograd's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compile_time.models import Job, built, step_of

MOST_SHARE = 0.40
MOST_GROWTH = 1.2  # of a stage, in terms of the growth of the graph; what is above 1 is noise
LEAST = 0.02  # seconds below which a stage's growth is noise
IMPORT = "import"


@dataclass(frozen=True)
class Stages:
    """One compilation: ``seconds`` of each stage of ours and ``torch`` of Dynamo and AOTAutograd."""

    model: str
    job: Job
    nodes: int
    kernels: int
    launches: int
    seconds: dict[str, float]
    torch: float

    @property
    def ours(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        return self.ours / self.torch


def measure(name: str, job: Job) -> Stages:
    """Compile in this process; meant to be called once in a process."""
    import torch
    import torch._dynamo
    import torch._functorch.aot_autograd

    from torchkiln import stats

    model, inputs = built(name, job)
    step = step_of(torch.compile(model, backend="kiln", options={"fallback": False}), inputs, job)
    calls = []
    for _ in range(2):
        start = time.thread_time()
        step()
        calls.append(time.thread_time() - start)
    found = stats()
    ours = {stage: taken for stage, taken in found.processor_seconds.items() if stage != "AOTAutograd"}
    rest = calls[0] - calls[1] - sum(ours.values())
    return Stages(name, job, found.nodes, found.kernels, found.launches, ours, rest)


def best(runs: Sequence[Stages]) -> Stages:
    """Runs of one compilation as one, each time being the least there was."""
    first = runs[0]
    seconds = {stage: min(run.seconds[stage] for run in runs) for stage in first.seconds}
    return Stages(**(_fields(first) | {"seconds": seconds, "torch": min(run.torch for run in runs)}))


def _fields(stages: Stages) -> dict[str, Any]:
    return dict(vars(stages))


def show(console: Console, job: Job, measured: Sequence[Stages]) -> None:
    """Seconds by stage and model, our share, and how stages grow with the layers of a model."""
    table = Table(title=f"{job}: processor seconds by stage", show_footer=False)
    table.add_column("stage")
    for model in measured:
        table.add_column(model.model, justify="right")
    names = dict.fromkeys(stage for model in measured for stage in model.seconds)
    for stage in names:
        table.add_row(stage, *(f"{model.seconds.get(stage, 0.0):.2f}" for model in measured))
    table.add_section()
    table.add_row("all of ours", *(f"{model.ours:.2f}" for model in measured))
    table.add_row("Dynamo and AOTAutograd", *(f"{model.torch:.2f}" for model in measured))
    table.add_row("our share of that", *(_judged(model.share, MOST_SHARE, f"{model.share:.0%}") for model in measured))
    table.add_section()
    table.add_row("nodes", *(str(model.nodes) for model in measured))
    table.add_row("kernels / launches", *(f"{model.kernels} / {model.launches}" for model in measured))
    console.print(table)
    for small, large in _sizes_of_one(measured):
        _show_growth(console, job, small, large)


def _show_growth(console: Console, job: Job, small: Stages, large: Stages) -> None:
    nodes = large.nodes / small.nodes
    table = Table(title=f"{job}: from {small.model} to {large.model}, whose graphs have {nodes:.2f} × the nodes")
    table.add_column("stage")
    for heading in (f"{small.model}, s", f"{large.model}, s", "grows", "growth / that of the nodes"):
        table.add_column(heading, justify="right")
    rows = {stage: (small.seconds[stage], large.seconds[stage]) for stage in small.seconds if stage != IMPORT}
    rows["Dynamo and AOTAutograd"] = small.torch, large.torch
    for stage, (before, after) in rows.items():
        growth = after / max(before, 1e-9)
        relative = "-" if after < LEAST else _judged(growth / nodes, MOST_GROWTH, f"{growth / nodes:.2f}")
        table.add_row(stage, f"{before:.3f}", f"{after:.3f}", f"{growth:.2f} ×", relative)
    console.print(table)


def _judged(value: float, most: float, text: str) -> str:
    return f"[green]{text}[/]" if value <= most else f"[red]{text}[/]"


def _sizes_of_one(measured: Sequence[Stages]) -> list[tuple[Stages, Stages]]:
    """The smallest and the largest of each model that was measured with several numbers of layers."""
    families: dict[str, list[tuple[int, Stages]]] = {}
    for stages in measured:
        if sized := re.fullmatch(r"(.+)-(\d+)", stages.model):
            families.setdefault(sized[1], []).append((int(sized[2]), stages))
    ordered = (sorted(sizes, key=lambda pair: pair[0]) for sizes in families.values() if len(sizes) > 1)
    return [(sizes[0][1], sizes[-1][1]) for sizes in ordered]
