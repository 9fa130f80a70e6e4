"""Memory-bound kernels: microseconds in a CUDA graph, and bytes a second as a share of those of a copy."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.registry import list_backends, register_backend

from benchmarks.gpu.entries import BACKENDS

ROOT = Path(__file__).parents[2]
SEPARATOR = "/"  # in no name
_ROUNDS, _CALLS = 7, 20
Function = Callable[..., Any]
Key = tuple[str, str]  # the name of a kernel and a dtype


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


def run(file: Path, only: str, minutes: float, limit: float = 120.0) -> None:
    """Measure what ``file`` does not have yet, and print the table.

    A process of its own measures. One that takes more than ``limit`` seconds for a kernel, or dies of it, is followed
    by another, which goes on with the next kernel.
    """
    end, tried = time.monotonic() + 60 * minutes, set[Key]()
    known = _known(_records(file))
    while missing := [key for key in _keys(only) if key not in known | tried]:
        if time.monotonic() > end - 20:
            print(f"time is up: {len(missing)} are left")
            break
        begun = len(_begun(file))
        command = [sys.executable, "-m", "benchmarks.gpu.kernels", str(file), *map(SEPARATOR.join, missing)]
        _watch(command, file, limit, end)
        if len(_begun(file)) == begun:
            print("a process measured nothing")
            break
        tried |= set(_begun(file)[begun:])
    print("\n| kernel | kiln µs | share of a copy | inductor / kiln | eager / kiln |\n|---|---|---|---|---|")
    for key, record in _latest(_records(file)).items():
        if key[0] in KERNELS:
            print(_row(record, KERNELS[key[0]], getattr(torch, key[1])))


def _watch(command: list[str], file: Path, limit: float, end: float) -> None:
    process = subprocess.Popen(command, cwd=ROOT)
    started = time.time()
    while process.poll() is None:
        time.sleep(0.2)
        quiet = time.time() - max(started, file.stat().st_mtime if file.exists() else 0.0)
        if quiet > limit or time.monotonic() > end:
            process.kill()  # one that hangs in the driver hears of nothing else
            print(f"stopped: {' '.join((_begun(file) or [('nothing', '')])[-1])}", flush=True)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            return


def measure(file: Path, keys: Sequence[Key]) -> None:
    """Measure in this process, and note in the file what is begun and what is found."""
    if "kiln" not in list_backends(exclude_tags=()):
        from torchkiln.backend import kiln

        register_backend(kiln, name="kiln")
    copy = _copy_bandwidth()
    print(f"a copy moves {copy / 1e9:.0f} GB/s", flush=True)
    for name, text in keys:
        _append(file, {"begun": [name, text]})
        dtype = getattr(torch, text)
        found = {"kernel": name, "dtype": text, "copy GB/s": copy / 1e9, **_measured(KERNELS[name], dtype)}
        _append(file, found)
        print(_row(found, KERNELS[name], dtype), flush=True)
        torch.cuda.synchronize()  # raises where the card takes nothing from this process any more


def _keys(only: str) -> list[Key]:
    names = [name for name in KERNELS if not only or any(part in name for part in only.split(","))]
    return [(name, dtype) for name in names for dtype in ("bfloat16", "float32")]


def _append(file: Path, record: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _records(file: Path) -> list[dict[str, Any]]:
    return [record for record in _lines(file) if "kernel" in record]


def _begun(file: Path) -> list[Key]:
    return [(record["begun"][0], record["begun"][1]) for record in _lines(file) if "begun" in record]


def _latest(records: Sequence[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    return {(record["kernel"], record["dtype"]): record for record in records}


def _known(records: Sequence[dict[str, Any]]) -> set[Key]:
    """What has a figure of ours; the others are tried again."""
    return {key for key, record in _latest(records).items() if isinstance(record.get("kiln"), float)}


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


if __name__ == "__main__":
    parts = (key.rpartition(SEPARATOR) for key in sys.argv[2:])
    measure(Path(sys.argv[1]), [(name, dtype) for name, _, dtype in parts])
