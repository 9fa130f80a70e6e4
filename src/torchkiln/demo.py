"""``kiln demo``: a small transformer and a small convolutional network, compiled, checked and timed against eager."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn


class Transformer(nn.Module):
    """A two-layer encoder over token ids with causal attention."""

    def __init__(self, vocabulary: int = 1000, width: int = 128, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(TransformerLayer(width, heads, length) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm."""

    causal: Tensor

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("causal", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mixed = torch.softmax(scores.masked_fill(~self.causal, float("-inf")), -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class ConvolutionalNetwork(nn.Module):
    """Three convolutions with batch norm and a residual connection, then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm2, self.norm3 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.enter(x)))
        y = F.relu(self.norm2(self.conv1(x)))
        x = F.relu(x + self.norm3(self.conv2(y)))
        result: Tensor = self.head(F.max_pool2d(x, 2).mean((2, 3)))
        return result


@dataclass(frozen=True)
class Outcome:
    """One row of the table: what was compiled, whether it matched eager, and how long things took."""

    network: str
    job: str
    difference: str
    first_call_seconds: float
    eager_ms: float
    kiln_ms: float


def run_demo(console: Console, rounds: int) -> bool:
    """Run everything, print the table, and say whether every check passed."""
    torch.manual_seed(0)
    networks: Mapping[str, tuple[nn.Module, Tensor]] = {
        "transformer": (Transformer(), torch.randint(1000, (4, 64))),
        "convolutional": (ConvolutionalNetwork(), torch.randn(8, 3, 32, 32)),
    }
    outcomes = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, (model, x) in networks.items():
            for trains in (False, True):
                job = "training step" if trains else "inference"
                task = progress.add_task(f"{name}, {job}: compile, check, measure", total=1)
                outcomes.append(_outcome(name, job, copy.deepcopy(model).train(trains), x, rounds))
                progress.update(task, advance=1)
    console.print(_table(outcomes))
    return all(not outcome.difference for outcome in outcomes)


def _outcome(name: str, job: str, model: nn.Module, x: Tensor, rounds: int) -> Outcome:
    reference = copy.deepcopy(model)
    # Without fallback: the demo shows compiled code or fails.
    compiled = torch.compile(model, backend="kiln", options={"fallback": False, "cache": False})

    def step(call: Callable[[Tensor], Tensor]) -> Tensor:
        output = call(x)
        if model.training:
            classes = output.new_zeros(output[..., 0].numel(), dtype=torch.long)
            F.cross_entropy(output.flatten(0, -2), classes).backward()
        return output

    with torch.set_grad_enabled(model.training):
        start = time.perf_counter()
        output = step(compiled)
        first = time.perf_counter() - start
        wanted = {"output": step(reference), **_left_behind(reference)}
        difference = _difference({"output": output, **_left_behind(model)}, wanted)
        eager_ms, kiln_ms = _interleaved_ms(lambda: step(reference), lambda: step(compiled), rounds)
    return Outcome(name, job, difference, first, eager_ms, kiln_ms)


def _left_behind(model: nn.Module) -> dict[str, Tensor]:
    """What a training step leaves in a model: gradients, and buffers such as running statistics."""
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, **{f"buffer {name}": buffer for name, buffer in model.named_buffers()}}


def _difference(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> str:
    """The first thing that is not as eager has it, or an empty string.

    The tolerance is relative to each tensor's largest magnitude: sums are taken in another order than eager's.
    """
    if got.keys() != want.keys():
        return f"only on one side: {', '.join(sorted(got.keys() ^ want.keys()))}"
    largest = max(value.abs().max().item() for value in want.values() if value.is_floating_point())
    for name, value in want.items():
        # A gradient that is zero but for rounding is compared on the scale of the others.
        scale = max(value.abs().max().item(), 1e-3 * largest) if value.is_floating_point() else 0.0
        if not torch.allclose(got[name], value, rtol=0.0, atol=1e-4 * scale):
            return f"{name} differs"
    return ""


def _interleaved_ms(eager: Callable[[], object], kiln: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median milliseconds of each, taken in turns so that a busy machine disturbs both alike."""
    times: dict[Callable[[], object], list[float]] = {eager: [], kiln: []}
    for _ in range(rounds):
        for call, seconds in times.items():
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return statistics.median(times[eager]) * 1e3, statistics.median(times[kiln]) * 1e3


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title=f"torchkiln against eager, {torch.get_num_threads()} threads")
    for heading in ("network", "job", "same as eager"):
        table.add_column(heading)
    for heading in ("first call, s", "eager, ms/step", "kiln, ms/step", "times faster"):
        table.add_column(heading, justify="right")
    for row in outcomes:
        table.add_row(
            row.network,
            row.job,
            f"[red]no: {row.difference}[/]" if row.difference else "[green]yes[/]",
            f"{row.first_call_seconds:.2f}",
            f"{row.eager_ms:.2f}",
            f"{row.kiln_ms:.2f}",
            f"{row.eager_ms / row.kiln_ms:.2f}",
        )
    return table
