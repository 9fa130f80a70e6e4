"""What graph passes cost: registering the built-in rewrites, and every pass on a joint graph of about 5,000 nodes.

The graphs are those of a deep transformer with attention written out: once so that attention is fused in every layer;
once with so few positions that every match is declined by its check, which the pass itself would see beforehand; once
with scores that go through a tanh, which no rewrite takes; and once with softmax over another dimension.
Rewrites are timed the first time in the process, when patterns are read from their files, and again on a fresh copy.
Matching is timed by the processor, which on a busy machine says more than the clock on the wall. The verdict is on the
first time, put in proportion to a graph of 5,000 nodes. Passes are timed by the clock, with what the garbage collector
did meanwhile: a collection of everything falls into one pass or another and is given apart.
"""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

REGISTERING_LIMIT = 0.050
MATCHING_LIMIT = 0.300
NODES = 5000

# Python reports for every module what running it took, without what it imports: so only the matcher and the files that
# register rewrites with it are counted, and neither torch nor the rest of the compiler.
_REGISTER = """
import torch, torch._dynamo, torch._functorch.aot_autograd, torch.fx.experimental.proxy_tensor
from torchkiln.passes import all_pipelines
all_pipelines()
from torchkiln.patterns.registration import rewrites_from_files
print(len(rewrites_from_files()))
"""
_REGISTERING = re.compile(
    r"import time: +(\d+) \| +\d+ \| +(?:torchkiln\.patterns|torchkiln\.passes\.joint\.attention)\b"
)


def registering(rounds: int) -> tuple[float, int]:
    """Seconds for importing and registering all built-in rewrites, the best of some new processes; and their number."""
    command = [sys.executable, "-X", "importtime", "-c", _REGISTER]
    # Byte code is written in the first process, as installing the package does, and read in the others.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(rounds + 1)
    ]
    microseconds = [sum(int(own) for own in _REGISTERING.findall(run.stderr)) for run in runs]
    return min(microseconds) * 1e-6, int(runs[0].stdout.splitlines()[-1])


def transformer(layers: int, *, between: Callable[[Any], Any] = lambda scores: scores, dim: int = -1) -> Any:
    """A stack of layers with attention written out: softmax over ``dim`` of ``between`` of the scores."""
    import torch

    width, heads = 32, 4

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
            self.out, self.up, self.down = (
                torch.nn.Linear(width, width), torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            y = self.before(x)
            query, key, value = (
                project(y).view(batch, length, heads, width // heads).transpose(1, 2)
                for project in (self.query, self.key, self.value)
            )
            scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(width // heads)
            mixed = torch.matmul(between(scores).softmax(dim), value).transpose(1, 2).reshape(batch, length, width)
            x = x + self.out(mixed)
            return x + self.down(torch.nn.functional.gelu(self.up(self.between(x))))

    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


class _Captured(Exception):
    """The graph is there and nothing is left to compile."""


def compile_passes(model: Any, length: int) -> tuple[Any, list[Any]]:
    """The joint graph of ``model`` for rows of ``length`` before its first pass, and a record of every pass."""
    import torch

    import torchkiln
    from torchkiln import config
    from torchkiln.compiler import compile_fx
    from torchkiln.graph.manager import Pass, PassManager, register_pass, unregister_pass
    from torchkiln.graph.subgraphs import copy_graph_module
    from torchkiln.partition import min_cut_rematerialization_partition
    from torchkiln.passes.post_grad import POST_GRAD

    graphs: list[torch.fx.GraphModule] = []
    settings = config.resolve({"record_passes": True, "fallback": False})

    def keep(graph_module: torch.fx.GraphModule) -> bool:
        graphs.append(copy_graph_module(graph_module))
        return False

    def split(joint: torch.fx.GraphModule, inputs: Any, **facts: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **facts)
        manager = PassManager(settings)
        manager.run(POST_GRAD, forward, kind="forward")
        manager.run(POST_GRAD, backward, kind="backward")
        raise _Captured

    def backend(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            compile_fx(graph_module, inputs, split=split, settings=settings)
        except Exception as error:
            if not isinstance(_cause(error), _Captured):
                raise
        return graph_module.forward

    register_pass("joint", "pre", Pass("keep a copy", keep), first=True)
    torchkiln.reset_stats()
    try:
        torch._dynamo.reset()
        torch.compile(model, backend=backend, dynamic=False)(torch.randn(2, length, 32))
    finally:
        unregister_pass("joint", "pre", "keep a copy")
    return graphs[0], [record for record in torchkiln.stats().passes if record.name != "keep a copy"]


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def rewrite_sets() -> list[tuple[str, Any]]:
    """The sets of rewrites among the built-in passes, with the stage and name of their pass."""
    from torchkiln.passes import all_pipelines
    from torchkiln.patterns import RewriteSet

    found = []
    for pipeline in all_pipelines():
        for item in pipeline.resolved():
            owner = getattr(item.sources, "__self__", None)
            if isinstance(owner, RewriteSet):
                found.append((f"{pipeline.stage}/{item.name}", owner))
    return found


def matching(graph_module: Any, rounds: int) -> list[float]:
    """Seconds for all sets of rewrites on copies of one graph in canonical form, the first time and again."""
    from torchkiln import canonicalize
    from torchkiln.graph.subgraphs import copy_graph_module

    canonical = copy_graph_module(graph_module)
    for item in canonicalize.JOINT:
        item.run(canonical)
    sets = [owner for name, owner in rewrite_sets() if name.startswith("joint/")]
    seconds = []
    for _ in range(rounds):
        copies = [copy_graph_module(canonical) for _ in sets]
        start = time.process_time()
        for owner, copy in zip(sets, copies, strict=True):
            owner.apply(copy)
        seconds.append(time.process_time() - start)
    return seconds


class Collections:
    """Seconds the garbage collector takes inside the block."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._start

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)


def _verdict(seconds: float, limit: float) -> str:
    return "[green]met" if seconds < limit else "[red]missed"


def main(
    layers: Annotated[int, typer.Option(help="Layers of the transformer; 28 give about 5,000 nodes.")] = 28,
    rounds: Annotated[int, typer.Option(help="Runs of everything that is timed; tables show the best.")] = 5,
) -> None:
    """Print what registering, matching and every pass cost."""
    console = Console()
    table = Table(title="Rewrites against their limits")
    for heading in ("what", "first, ms", "best, ms", "median, ms", "first per 5,000", "limit, ms", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    with console.status("registering"):
        seconds, count = registering(rounds)
    table.add_row(
        f"import and register {count} rewrites", "", f"{seconds * 1e3:.1f}", "", "",
        f"{REGISTERING_LIMIT * 1e3:.0f}", _verdict(seconds, REGISTERING_LIMIT),
    )  # fmt: skip
    records: list[Any] = []
    size, collected = 0, 0.0
    variants: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("attention, fused", 512, {}),
        ("attention, declined", 16, {}),
        ("attention with capped scores", 512, {"between": lambda scores: scores.tanh()}),
        ("attention over another dimension", 512, {"dim": -2}),
    )
    for title, length, options in variants:
        with console.status(title):
            with Collections() as collections:
                graph_module, recorded = compile_passes(transformer(layers, **options), length)
            nodes = len(graph_module.graph.nodes)
            if not records:
                records, size, collected = recorded, nodes, collections.seconds
            times = matching(graph_module, rounds)
        scaled = times[0] * NODES / nodes
        table.add_row(
            f"match {title} ({nodes:,} nodes)",
            *(f"{value * 1e3:.1f}" for value in (times[0], min(times), median(times), scaled)),
            f"{MATCHING_LIMIT * 1e3:.0f}", _verdict(scaled, MATCHING_LIMIT),
        )  # fmt: skip
    console.print(table)
    table = Table(title=f"Every pass, on the graphs of a joint graph of {size:,} nodes with attention in every layer")
    for heading in ("stage", "pass", "ms", "changed"):
        table.add_column(heading, justify="right" if heading == "ms" else "left")
    for record in records:
        if not record.skipped:
            table.add_row(record.stage, record.name, f"{record.seconds * 1e3:.1f}", "yes" if record.changed else "")
    table.add_row("", "all", f"{sum(record.seconds for record in records) * 1e3:.1f}", "", style="bold")
    console.print(table)
    console.print(f"of all compiling up to there, {collected * 1e3:.0f} ms were the garbage collector's")


if __name__ == "__main__":
    typer.run(main)
