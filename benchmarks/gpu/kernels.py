"""Memory-bound kernels: microseconds in a CUDA graph, and bytes a second as a share of those of a copy."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.registry import list_backends, register_backend

from benchmarks.gpu.entries import BACKENDS

_ROUNDS, _CALLS = 7, 20
Function = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """A function, its inputs of a dtype, and how many elements of that dtype it has to read and write."""

    function: Function
    inputs: Callable[[torch.dtype], list[Tensor]]
    moved: int


def _x(*sizes: int) -> Callable[[torch.dtype], list[Tensor]]:
    return lambda dtype: [torch.randn(*sizes, device="cuda", dtype=dtype)]


def _with_rows(*sizes: int, rows: int = 1) -> Callable[[torch.dtype], list[Tensor]]:
    def made(dtype: torch.dtype) -> list[Tensor]:
        parameters = [torch.randn(sizes[-1], device="cuda", dtype=dtype) for _ in range(rows)]
        return [torch.randn(*sizes, device="cuda", dtype=dtype), *parameters]

    return made


def _rope(x: Tensor, sines: Tensor, cosines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def _rope_inputs(dtype: torch.dtype) -> list[Tensor]:
    angles = [torch.randn(1024, 128, device="cuda", dtype=dtype) for _ in range(2)]
    return [torch.randn(16, 32, 1024, 128, device="cuda", dtype=dtype), *angles]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def _chain(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = F.gelu(x * 1.1 + y) * torch.sigmoid(x - y)
    return x


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m = m.lerp(g, 0.1)
    v = v * 0.999 + g * g * 0.001
    return p * 0.9999 - 1e-3 * m / (v.abs().sqrt() + 1e-8), m, v


def _loss(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


def _loss_inputs(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(4096, 32000, device="cuda", dtype=dtype), torch.randint(0, 32000, (4096,), device="cuda")]


_MANY = 1 << 26
_SQUARE = 8192
KERNELS = {
    "layer norm 16384 x 4096": Kernel(
        lambda x, w, b: F.layer_norm(x, (4096,), w, b), _with_rows(16384, 4096, rows=2), 2 * _MANY
    ),
    "layer norm 65536 x 768": Kernel(
        lambda x, w, b: F.layer_norm(x, (768,), w, b), _with_rows(65536, 768, rows=2), 2 * 65536 * 768
    ),
    "layer norm, gelu": Kernel(
        lambda x, w, b: F.gelu(F.layer_norm(x, (4096,), w, b)), _with_rows(16384, 4096, rows=2), 2 * _MANY
    ),
    "softmax 16384 x 4096": Kernel(lambda x: torch.softmax(x, -1), _x(16384, 4096), 2 * _MANY),
    "softmax 131072 x 512": Kernel(lambda x: torch.softmax(x, -1), _x(131072, 512), 2 * _MANY),
    "rms norm 16384 x 4096": Kernel(_rms, _with_rows(16384, 4096), 2 * _MANY),
    "rope": Kernel(_rope, _rope_inputs, 2 * 16 * 32 * 1024 * 128),
    "cross entropy 4096 x 32000": Kernel(_loss, _loss_inputs, 4096 * 32000),
    "chain": Kernel(_chain, lambda dtype: [*_x(_MANY)(dtype), *_x(_MANY)(dtype)], 3 * _MANY),
    "transpose": Kernel(lambda x: x.t().contiguous(), _x(_SQUARE, _SQUARE), 2 * _SQUARE**2),
    "transposed sum": Kernel(
        lambda x, y: x + y.t(), lambda d: [*_x(_SQUARE, _SQUARE)(d), *_x(_SQUARE, _SQUARE)(d)], 3 * _SQUARE**2
    ),
    "sum of rows": Kernel(lambda x: x.sum(-1), _x(16384, 4096), _MANY),
    "sum of columns": Kernel(lambda x: x.sum(0), _x(16384, 4096), _MANY),
    "sum of all": Kernel(lambda x: x.float().sum(), _x(16384, 4096), _MANY),
    "adamw": Kernel(_adamw, lambda dtype: [t for _ in range(4) for t in _x(_MANY)(dtype)], 7 * _MANY),
}


def run(file: Path, only: str, minutes: float) -> None:
    """Measure what ``file`` does not have yet, and print the table."""
    if "kiln" not in list_backends(exclude_tags=()):
        from torchkiln.backend import kiln

        register_backend(kiln, name="kiln")
    done = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    known = {(record["kernel"], record["dtype"]) for record in done}
    end = time.monotonic() + 60 * minutes
    copy = _copy_bandwidth()
    print(f"a copy moves {copy / 1e9:.0f} GB/s", flush=True)
    names = [name for name in KERNELS if not only or any(part in name for part in only.split(","))]
    for name in names:
        for dtype in (torch.bfloat16, torch.float32):
            text = str(dtype).removeprefix("torch.")
            if (name, text) in known or time.monotonic() > end - 20:
                continue
            found = {"kernel": name, "dtype": text, "copy GB/s": copy / 1e9, **_measured(KERNELS[name], dtype)}
            done.append(found)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            print(_row(found, KERNELS[name], dtype), flush=True)
    print("\n| kernel | kiln µs | share of a copy | inductor / kiln | eager / kiln |\n|---|---|---|---|---|")
    for record in done:
        if record["kernel"] in KERNELS:
            print(_row(record, KERNELS[record["kernel"]], getattr(torch, record["dtype"])))


def _row(found: dict[str, Any], kernel: Kernel, dtype: torch.dtype) -> str:
    ours = found.get("kiln")
    if not isinstance(ours, float):
        return f"| {found['kernel']} {found['dtype']} | {ours} | | | |"
    share = kernel.moved * dtype.itemsize / (ours * 1e-6) / (found["copy GB/s"] * 1e9)
    others = [found.get(name) for name in ("inductor", "eager")]
    ratios = [f"{other / ours:.2f}" if isinstance(other, float) else str(other) for other in others]
    return f"| {found['kernel']} {found['dtype']} | {ours:.1f} | {share:.0%} | {' | '.join(ratios)} |"


def _measured(kernel: Kernel, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds of each backend, in turns; what failed instead, where one did."""
    inputs = kernel.inputs(dtype)
    graphs: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name in ("eager", "kiln", "inductor"):
        torch._dynamo.reset()
        options = BACKENDS[name]
        function = kernel.function if options is None else torch.compile(kernel.function, **options)
        try:
            start = time.perf_counter()
            graphs[name] = _graph(function, inputs)
            found[f"{name} first s"] = time.perf_counter() - start
        except Exception as error:  # the others are measured all the same
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            times[name].append(_microseconds(graph))
    return found | {name: statistics.median(measured) for name, measured in times.items()}


def _graph(function: Function, inputs: list[Tensor]) -> Any:
    """A CUDA graph of calls, so that launches do not count."""
    side = torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                function(*inputs)
    return graph


def _microseconds(graph: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _CALLS * 1e3


def _copy_bandwidth() -> float:
    """Bytes a second that a copy of 256 MiB reads and writes."""
    source = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    graph = _graph(lambda x: target.copy_(x), [source])
    return 2 * source.numel() / (statistics.median(_microseconds(graph) for _ in range(_ROUNDS)) * 1e-6)
