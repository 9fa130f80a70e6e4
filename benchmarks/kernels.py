"""Kernel times of kiln against inductor and eager, as ratios from one interleaved run.

In every round each implementation runs for the same short while, in an order that changes from round to round, and
only times of the same round are divided. So a machine that slows down for a second disturbs one round, not one
implementation. Shown is the median of the rounds' ratios, with the quartiles as the spread. A ratio above one means
that kiln is faster.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Kernel:
    """One function to compile, and its sizes; ``make`` gives the arguments for a size and a dtype."""

    name: str
    fn: Callable[..., Any]
    make: Callable[[tuple[int, ...], torch.dtype], tuple[Tensor, ...]]
    sizes: tuple[tuple[int, ...], ...]


def _one(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randn(size, dtype=dtype),)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias))


def _norm_inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.randn(size[-1], dtype=dtype), torch.randn(size[-1], dtype=dtype)


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    x = x + residual
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def _rms_inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.randn(size[-1], dtype=dtype), torch.randn(size, dtype=dtype)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def _rotary_inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    _, _, length, width = size
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
    return torch.randn(size, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def _cross_entropy_inputs(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.randint(size[1], size[:1])


def pointwise_chain(x: Tensor, y: Tensor) -> Tensor:
    for step in range(4):
        x = torch.sigmoid(x) * torch.tanh(y + step) + x * 0.5
        y = torch.where(y > 0, y * x, torch.exp(-y.abs())) - 0.25
    return x * y


def _two(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)


def transposed_copy(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous()


def heads_to_front(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous()


def transposed_sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y.transpose(-1, -2)


def row_sum(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def row_max(x: Tensor) -> Tensor:
    return x.amax(-1)


def column_sum(x: Tensor) -> Tensor:
    return x.square().sum(0)


def column_variance(x: Tensor) -> Tensor:
    return x.var(0)


def whole_sum(x: Tensor) -> Tensor:
    return (x * 2 - 1).sum()


ROWS = ((128, 1024), (2048, 768), (512, 8192))
KERNELS = (
    Kernel("softmax", softmax, _one, ((12, 128, 128), (2048, 1024), (256, 30522))),
    Kernel("layer norm + gelu", layer_norm_gelu, _norm_inputs, ((128, 768), (2048, 768), (1024, 4096))),
    Kernel("RMS norm + residual", rms_norm, _rms_inputs, ((128, 1024), (1024, 4096))),
    Kernel("rotary embedding", rotary_embedding, _rotary_inputs, ((1, 12, 128, 64), (4, 32, 512, 128))),
    Kernel("cross entropy", cross_entropy, _cross_entropy_inputs, ((512, 1000), (256, 32000))),
    Kernel("pointwise chain", pointwise_chain, _two, ((1 << 14,), (1 << 18,), (1 << 22,))),
    Kernel("transposed copy", transposed_copy, _one, ((512, 512), (2048, 2048), (16, 1000, 37))),
    Kernel("heads to front", heads_to_front, _one, ((8, 128, 12, 64),)),
    Kernel("x + y transposed", transposed_sum, _two, ((1024, 1024),)),
    Kernel("row sum of squares", row_sum, _one, ROWS),
    Kernel("row maximum", row_max, _one, ROWS),
    Kernel("column sum of squares", column_sum, _one, ROWS),
    Kernel("column variance", column_variance, _one, ROWS),
    Kernel("whole sum", whole_sum, _one, ((1 << 16,), (1 << 22,))),
)


@dataclass(frozen=True)
class Ratio:
    """Time of another implementation over kiln's: median of the rounds, with quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, theirs: list[float], ours: list[float]) -> Ratio:
        ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
        return cls(statistics.median(ratios), ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4])

    def cell(self) -> str:
        color = "green" if self.median >= 1.05 else "red" if self.median < 0.95 else "yellow"
        return f"[{color}]{self.median:.2f}[/] ({self.low:.2f} to {self.high:.2f})"


def seconds_per_call(fn: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def interleaved(fns: dict[str, Callable[[], object]], rounds: int, slice_seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each function in each round."""
    calls = {}
    for name, fn in fns.items():
        seconds_per_call(fn, 3)
        calls[name] = max(1, round(slice_seconds / max(seconds_per_call(fn, 3), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in fns}
    order = list(fns)
    for number in range(rounds):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            times[name].append(seconds_per_call(fns[name], calls[name]))
    return times


def check(name: str, got: Tensor, want: Tensor, exact: Tensor) -> None:
    """A fast wrong kernel is worth nothing: it must be about as near to the result in float64 as eager is.

    Comparing with eager alone would not do in bfloat16: eager rounds after every operation of a chain, a fused
    kernel at its end, and the two differ by eager's error.
    """
    unit = torch.finfo(want.dtype).eps
    allowed = 2 * (want.double() - exact).abs().max() + 4 * unit * (1 + exact.abs())
    error = (got.double() - exact).abs()
    if not bool((error <= allowed).all()):
        raise AssertionError(f"{name}: off by {float(error.max()):.3g} from the result in float64")


def selected(only: str | None, dtype: str | None, quick: bool) -> Iterator[tuple[Kernel, tuple[int, ...], str]]:
    words = [word.strip().lower() for word in only.split(",")] if only else [""]
    for kernel in KERNELS:
        if any(word in kernel.name.lower() for word in words):
            for size in kernel.sizes[:1] if quick else kernel.sizes:
                for name in [dtype] if dtype else DTYPES:
                    yield kernel, size, name


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def main(
    only: Annotated[str | None, typer.Option(help="Kernels with one of these words in the name, with commas.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; both without it.")] = None,
    quick: Annotated[bool, typer.Option(help="The smallest size of each kernel and fewer rounds.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds of each measurement.")] = 0,
    peers: Annotated[str, typer.Option(help="What to compare with: eager, or a backend.")] = "inductor,eager",
    subject: Annotated[str, typer.Option(help="The backend that is judged.")] = "kiln",
    threads: Annotated[int, typer.Option(help="torch's threads; its default without it.")] = 0,
) -> None:
    """Print the ratios and their geometric mean; exit code 1 when a result differs from eager's."""
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype is one of {', '.join(DTYPES)}")
    if threads:
        torch.set_num_threads(threads)
    rounds = rounds or (9 if quick else 21)
    peer_names = [name.strip() for name in peers.split(",") if name.strip()]
    jobs = list(selected(only, dtype, quick))
    if not jobs:
        raise typer.BadParameter(f"no kernel is called like that; there are: {', '.join(k.name for k in KERNELS)}")

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"{subject}, {torch.get_num_threads()} threads: times faster (median, quartiles)")
    for heading in ("kernel", "size", "dtype"):
        table.add_column(heading)
    for heading in (f"{subject}, µs", *(f"vs {name}" for name in peer_names)):
        table.add_column(heading, justify="right")
    medians: dict[str, list[float]] = {name: [] for name in peer_names}
    wrong = []
    with Progress(console=console, transient=True) as progress, torch.no_grad():
        task = progress.add_task("", total=len(jobs))
        for kernel, size, dtype_name in jobs:
            shape = " × ".join(map(str, size))
            label = f"{kernel.name}, {shape}, {dtype_name}"
            progress.update(task, description=label)
            torch.manual_seed(0)
            torch._dynamo.reset()
            args = kernel.make(size, DTYPES[dtype_name])
            fns = {name: bind(compiled(kernel.fn, name), args) for name in [subject, *peer_names]}
            try:
                exact = kernel.fn(*(a.double() if a.is_floating_point() else a for a in args))
                check(label, fns[subject](), kernel.fn(*args), exact.double())
            except AssertionError as error:
                wrong.append(str(error))
            times = interleaved(fns, rounds, 0.005 if quick else 0.01)
            ratios = {name: Ratio.of(times[name], times[subject]) for name in peer_names}
            for name, ratio in ratios.items():
                medians[name].append(ratio.median)
            micros = statistics.median(times[subject]) * 1e6
            table.add_row(kernel.name, shape, dtype_name, f"{micros:.1f}", *(r.cell() for r in ratios.values()))
            progress.advance(task)
    table.add_section()
    table.add_row("geometric mean", "", "", "", *(f"{geometric_mean(medians[name]):.2f}" for name in peer_names))
    table.add_row("slowest", "", "", "", *(f"{min(medians[name]):.2f}" for name in peer_names))
    console.print(table)
    for message in wrong:
        console.print(f"[red]wrong result[/]: {message}")
    raise typer.Exit(1 if wrong else 0)


def compiled(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if backend == "eager":
        return fn
    options = {"fallback": False} if backend == "kiln" else None
    return torch.compile(fn, backend=backend, options=options, dynamic=False)


def bind(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: fn(*args)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kernels-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        os.environ["KILN_CACHE"] = "0"
        sys.exit(typer.run(main))
