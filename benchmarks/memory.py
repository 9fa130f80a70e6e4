"""Memory for backward and step time of kiln and inductor at the same memory budgets, with eager beside them.

For every model and budget: bytes that autograd holds between forward and backward, the peak of a training step, and the
time of one step. Times come from interleaved rounds, in an order that changes from round to round; shown is the median.
Bytes are measured, not planned: what autograd is given to keep, every memory once, without parameters, inputs and
results. The peak counts memory that is allocated and freed inside the step, so gradients and results are not in it.
With ``--bytes-only`` no code is generated: what is saved is decided before, so the graphs are interpreted, which takes
seconds where compiling takes minutes. Run as ``python -m benchmarks.memory``.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

import torch
import torch._functorch.config as functorch_config
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from benchmarks.partition import seconds_for
from tests.partition.measured import joint_graph, step_peak
from tests.partition.models import ConvNet, Llama, Mlp, Transformer
from torchkiln.compiler import compile_fx
from torchkiln.config import Settings
from torchkiln.memory.amounts import bytes_text
from torchkiln.memory.capture import interpreted
from torchkiln.memory.saved import saved_by
from torchkiln.partition.budget import Planner
from torchkiln.partition.classify import NodeInfo
from torchkiln.target import capture_target

BUDGETS = (1.0, 0.5, 0.3)
NODES = (1250, 5000, 20000)
NODES_PER_BLOCK = 28  # of the graphs that benchmarks/partition.py makes


@dataclass(frozen=True)
class Model:
    """``make`` builds the model for a number of layers; ``inputs`` are given to it."""

    name: str
    make: Callable[[int], nn.Module]
    layers: int
    inputs: Callable[[], tuple[Tensor, ...]]


MODELS = (
    Model("mlp", lambda layers: Mlp(width=256, depth=layers), 6, lambda: (torch.randn(512, 256),)),
    Model("transformer", lambda layers: Transformer(width=128, depth=layers), 3, lambda: (torch.randint(50, (8, 64)),)),
    Model("convnet", lambda layers: ConvNet(channels=32, depth=layers), 3, lambda: (torch.randn(8, 3, 32, 32),)),
    Model("llama", lambda layers: Llama(width=128, depth=layers), 3, lambda: (torch.randn(8, 64, 128),)),
)


@dataclass(frozen=True)
class Row:
    """One way to run one model. ``budget`` is None for eager, the simulated figures are for all but kiln, and peak and
    seconds where no code was generated.
    """

    model: str
    way: str
    budget: float | None
    saved_bytes: int
    peak_bytes: int | None
    step_seconds: float | None
    simulated_saved_bytes: int | None = None
    simulated_peak_bytes: int | None = None


@dataclass(frozen=True)
class PartitionTime:
    nodes: int
    budget: float
    seconds: float


class Step:
    """A training step of one model in one way, with a copy of the model of its own."""

    def __init__(
        self, model: nn.Module, inputs: tuple[Tensor, ...], way: str, budget: float | None, interpreted: bool
    ) -> None:
        self.model = copy.deepcopy(model)
        self.inputs = inputs
        self.way, self.budget = way, budget
        self._run = self._prepared(interpreted)

    def _prepared(self, interpreted: bool) -> Callable[..., Any]:
        model = self.model

        def call(*inputs: Tensor) -> Tensor:
            return model(*inputs)

        if self.way == "eager":
            return call
        # Dynamo finds compiled code by code object; the same one for all budgets would run the code of the first.
        own = FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
        options = {"fallback": False, "memory_budget": self.budget} if self.way == "kiln" else None
        backend: Any = self.way
        if interpreted:
            backend, options = _interpreting(self.way, options), None
        return torch.compile(own, backend=backend, fullgraph=True, dynamic=False, options=options)

    def forward(self) -> Tensor:
        with functorch_config.patch(activation_memory_budget=1.0 if self.budget is None else self.budget):
            result: Tensor = self._run(*self.inputs)
        return result

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self._run(*self.inputs).square().mean().backward()

    def compile(self) -> None:
        """The first step, in which the budget must be in force."""
        self.model.zero_grad(set_to_none=True)
        self.forward().square().mean().backward()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def saved_bytes(self) -> int:
        others = [*self.inputs, *self.model.parameters(), *self.model.buffers()]
        return saved_by(self.forward, others).bytes

    def peak_bytes(self) -> int:
        """The most memory at one time that forward and backward allocate and free again, kiln's arenas included."""
        self()
        self.model.zero_grad(set_to_none=True)
        return step_peak(self.forward, ())


def _interpreting(way: str, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """A backend with all of ``way`` but the code: its functional graphs are interpreted."""

    def kiln(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_fx(gm, inputs, inner_compile=interpreted, settings=Settings(**(options or {})))

    def inductor(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx as compile_with_inductor

        with functorch_config.patch(enable_autograd_cache=False):
            return compile_with_inductor(gm, inputs, inner_compile=interpreted)

    return kiln if way == "kiln" else inductor


def interleaved_seconds(steps: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The median seconds of each, taken in turns so that a busy machine disturbs all alike."""
    times: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    for number in range(rounds):
        turn = number % len(order)
        for place in order[turn:] + order[:turn]:
            start = time.perf_counter()
            steps[place]()
            times[place].append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def measure(
    model: Model, layers: int, rounds: int, ways: Sequence[str], interpreted: bool, say: Callable[[str], None]
) -> list[Row]:
    """All rows of one model. Raises AssertionError where gradients are not eager's."""
    torch.manual_seed(0)
    module, inputs = model.make(layers), model.inputs()
    say(f"{model.name}: joint graph")
    joint = joint_graph(copy.deepcopy(module), *inputs)
    info = NodeInfo(joint.module.graph, joint.num_fwd_outputs)
    planner = Planner(info, Settings(), capture_target(Settings()))
    steps = [Step(module, inputs, "eager", None, interpreted)]
    steps += [Step(module, inputs, way, budget, interpreted) for budget in BUDGETS for way in ways]
    for step in steps:
        say(f"{model.name}: compile {step.way}" + ("" if step.budget is None else f" at {step.budget:g}"))
        step.compile()
        for got, want in zip(step.gradients(), steps[0].gradients(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    say(f"{model.name}: bytes")
    saved = [step.saved_bytes() for step in steps]
    peaks: list[int | None] = [None] * len(steps)
    seconds: list[float | None] = [None] * len(steps)
    if not interpreted:
        peaks[:] = [step.peak_bytes() for step in steps]
        say(f"{model.name}: times")
        seconds[:] = interleaved_seconds(steps, rounds)
    rows = []
    for step, held, peak, median in zip(steps, saved, peaks, seconds, strict=True):
        plan = planner.plan(step.budget) if step.way == "kiln" and step.budget is not None else None
        simulated = (plan.saved_bytes, plan.peak_bytes) if plan is not None else (None, None)
        rows.append(Row(model.name, step.way, step.budget, held, peak, median, *simulated))
    return rows


def partition_times(nodes: Sequence[int], say: Callable[[str], None]) -> list[PartitionTime]:
    """Processor seconds to split joint graphs of about so many nodes, at budget 1 and below, best of three."""
    seconds_for(4, Settings(memory_budget=0.5), 1)  # imports, rates of the machine
    found = []
    for wanted in nodes:
        for budget in (1.0, 0.5):
            say(f"partition: {wanted:,} nodes at budget {budget:g}")
            count, seconds = seconds_for(wanted // NODES_PER_BLOCK, Settings(memory_budget=budget), 3)
            found.append(PartitionTime(count, budget, seconds))
    return found


def memory_table(rows: Sequence[Row]) -> Table:
    table = Table(title=f"Training memory and step time, {torch.get_num_threads()} threads")
    table.add_column("model")
    table.add_column("budget", justify="right")
    table.add_column("")
    for heading in ("saved", "simulated", "peak of a step", "simulated", "ms/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("saved vs inductor", "time vs inductor"):
        table.add_column(heading, justify="right")
    for row in rows:
        peer = next((r for r in rows if (r.model, r.way, r.budget) == (row.model, "inductor", row.budget)), None)
        against = ["", ""]
        if row.way == "kiln" and peer is not None:
            against = [
                _ratio(row.saved_bytes / peer.saved_bytes if peer.saved_bytes else 1.0, 1.0),
                _ratio(row.step_seconds / peer.step_seconds, 1.05) if row.step_seconds and peer.step_seconds else "",
            ]
        table.add_row(
            row.model,
            "" if row.budget is None else f"{row.budget:g}",
            row.way,
            bytes_text(row.saved_bytes),
            "" if row.simulated_saved_bytes is None else bytes_text(row.simulated_saved_bytes),
            "" if row.peak_bytes is None else bytes_text(row.peak_bytes),
            "" if row.simulated_peak_bytes is None else bytes_text(row.simulated_peak_bytes),
            "" if row.step_seconds is None else f"{row.step_seconds * 1e3:.2f}",
            *against,
        )
    return table


def _ratio(value: float, most: float) -> str:
    return f"[{'green' if value <= most else 'red'}]{value:.2f}[/]"


def partition_table(times: Sequence[PartitionTime]) -> Table:
    table = Table(title="Processor seconds to partition a joint graph")
    for heading in ("nodes", "budget", "seconds", "µs per node"):
        table.add_column(heading, justify="right")
    for found in times:
        cost = found.seconds / found.nodes * 1e6
        table.add_row(f"{found.nodes:,}", f"{found.budget:g}", f"{found.seconds:.3f}", f"{cost:.1f}")
    return table


def write_json(path: Path, rows: Sequence[Row], times: Sequence[PartitionTime]) -> None:
    content = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rows": [asdict(row) for row in rows],
        "partition": [asdict(found) for found in times],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(unfinished, path)


def main(
    models: Annotated[str, typer.Option(help="Models to measure, with commas.")] = ",".join(m.name for m in MODELS),
    quick: Annotated[bool, typer.Option(help="Two layers, fewer rounds, no joint graph of 20,000 nodes.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of each time.")] = 0,
    peer: Annotated[bool, typer.Option(help="Measure inductor too, which needs a C++ compiler.")] = True,
    bytes_only: Annotated[
        bool, typer.Option(help="No code, times and peaks: what is saved alone, in seconds.")
    ] = False,
    partition: Annotated[bool, typer.Option(help="Time the partition of large joint graphs too.")] = True,
    threads: Annotated[int, typer.Option(help="torch's threads; its default without it.")] = 0,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = Path("results/memory.json"),
) -> None:
    """Print the tables and write the figures; exit code 1 when gradients differ from eager's."""
    names = [name.strip() for name in models.split(",") if name.strip()]
    unknown = [name for name in names if name not in {model.name for model in MODELS}]
    if unknown:
        raise typer.BadParameter(f"no model {unknown[0]!r}; there are: {', '.join(m.name for m in MODELS)}")
    if threads:
        torch.set_num_threads(threads)
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows: list[Row] = []
    times: list[PartitionTime] = []
    wrong = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def say(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(text)

        for model in MODELS:
            if model.name not in names:
                continue
            torch._dynamo.reset()
            ways = ("kiln", "inductor") if peer else ("kiln",)
            try:
                rows += measure(
                    model, 2 if quick else model.layers, rounds or (7 if quick else 31), ways, bytes_only, say
                )
            except AssertionError as error:
                wrong.append(f"{model.name}: {error}")
            write_json(output, rows, times)
        if partition:
            times = partition_times(NODES[:2] if quick else NODES, say)
    write_json(output, rows, times)
    if rows:
        console.print(memory_table(rows))
    if times:
        console.print(partition_table(times))
    for message in wrong:
        console.print(f"[red]wrong gradients[/]: {message}")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="memory-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        os.environ["KILN_CACHE"] = "0"
        sys.exit(typer.run(main))
