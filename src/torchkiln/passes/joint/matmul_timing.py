"""Times of matmuls as they are and padded: measured once on a device, kept in memory and in a file.

The file is JSON under the user's cache folder (``$XDG_CACHE_HOME/torchkiln``, or ``~/.cache/torchkiln``). It is only
ever replaced as a whole, so readers never see half of one. A file that cannot be read or written, or holds something
else, is ignored and never waited for; a path that is no regular file (a folder, a pipe, a device) is left alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchkiln.graph.fake import is_row_major, outside_tracing
from torchkiln.target import Target
from torchkiln.user_files import cache_folder, write_whole

_aten = torch.ops.aten

Sizes = tuple[int, int, int]
"""M, K and N of a matmul: rows of the first matrix, columns of it, columns of the second."""


@dataclass(frozen=True)
class Operand:
    """A tensor as a measurement needs it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(value: torch.Tensor) -> Operand:
        return Operand(tuple(value.shape), tuple(value.stride()))


@dataclass(frozen=True)
class Matmul:
    """``mm`` or ``bmm`` of two operands, or ``addmm`` of a term and two operands."""

    operator: str
    device: torch.device
    dtype: torch.dtype
    operands: tuple[Operand, ...]

    @property
    def sizes(self) -> Sizes:
        first, second = self.operands[-2:]
        return first.shape[-2], first.shape[-1], second.shape[-1]


@dataclass(frozen=True)
class Times:
    """Seconds of a matmul as it is, and with its operands padded and its result sliced."""

    plain: float
    padded: float


# A line of the file takes about 200 bytes, so this is 20,000 matmuls. A file that is longer is not read, and replaced.
_MOST_BYTES = 4 << 20


def cache_file() -> Path | None:
    """Where times are kept from one process to the next; None for a user without a home."""
    folder = cache_folder()
    return None if folder is None else folder / "matmul_times.json"


@dataclass
class TimeCache:
    """Times by :func:`key_of`. With ``path``, those of earlier processes are read at the first question."""

    path: Path | None = None
    _times: dict[str, Times | None] = field(default_factory=dict)
    _read: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def times(self, key: str, measure: Callable[[], Times | None]) -> Times | None:
        """What was measured before, or what ``measure`` says now."""
        with self._lock:
            if not self._read:
                self._times = {**_load(self.path), **self._times}
                self._read = True
            if key not in self._times:
                found = self._times[key] = measure()
                if found is not None:
                    self._store(key, found)
            return self._times[key]

    def _store(self, key: str, found: Times) -> None:
        if self.path is None:
            return
        together = {**_load(self.path), key: found}  # others may have written since
        content = {name: [times.plain, times.padded] for name, times in sorted(together.items())}
        with contextlib.suppress(OSError):
            if self.path.is_file() or not self.path.exists():
                write_whole(self.path, json.dumps(content, indent=0).encode())


def key_of(matmul: Matmul, padded: Sizes, target: Target) -> str:
    """All that the times of a matmul and of its padded form depend on, as text."""
    operands = " ".join(f"{operand.shape}/{operand.stride}" for operand in matmul.operands)
    machine = f"{_machine(matmul, target)} torch {torch.__version__}"
    return f"{machine} {matmul.operator} {matmul.dtype} {operands} to {padded}"


def _machine(matmul: Matmul, target: Target) -> str:
    """The processor and the precision of float32. GPUs and the number of threads are no part of a target yet."""
    precision = ""
    if matmul.device.type != "cuda":
        if matmul.dtype == torch.float32:
            precision = f" {target.float32_matmul}"
        return f"{target.cpu} {target.vector_bits} {torch.get_num_threads()} threads{precision}"
    if matmul.dtype == torch.float32:
        precision = f" {torch.get_float32_matmul_precision()}"
    return f"{torch.cuda.get_device_name(matmul.device) if torch.cuda.is_available() else 'cuda'}{precision}"


def _load(path: Path | None) -> dict[str, Times]:
    """The times in the file; none where it is not there, cannot be read, or is something else."""
    if path is None:
        return {}
    try:
        content = json.loads(_read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    found = {key: _times(value) for key, value in content.items()}
    return {key: times for key, times in found.items() if times is not None}


def _read(path: Path) -> bytes:
    """The bytes of a regular file of sensible size; OSError for anything else, without waiting for a writer."""
    # Asked before it is opened too: opening a device may do something.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(f"{path} is too long")
    return content


def _times(value: object) -> Times | None:
    if not isinstance(value, list) or len(value) != 2 or any(type(item) not in (int, float) for item in value):
        return None
    try:
        plain, padded = map(float, value)
    except OverflowError:
        return None
    return Times(plain, padded) if 0 < plain < math.inf and 0 < padded < math.inf else None


# -- measuring --------------------------------------------------------------------------------------------------------

_SECONDS = 0.02
_LEAST_RUNS, _MOST_RUNS = 5, 200


def measure_on_device(matmul: Matmul, padded: Sizes) -> Times | None:
    """Run both forms in turns on the device of the matmul, on numbers that leave the user's generators alone.

    None where they cannot be run.
    """
    if matmul.device.type == "cuda" and (not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()):
        return None
    plain = getattr(_aten, matmul.operator).default
    with outside_tracing():
        try:
            operands = [_random(operand, matmul) for operand in matmul.operands]
            return _in_turns(
                lambda: plain(*operands), lambda: run_padded(matmul.operator, operands, padded), matmul.device
            )
        except torch.OutOfMemoryError:
            return None


def _random(operand: Operand, matmul: Matmul) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True))
    generator = torch.Generator(matmul.device).manual_seed(0)
    memory = torch.randn(extent, generator=generator, device=matmul.device, dtype=torch.float32).to(matmul.dtype)
    return memory.as_strided(operand.shape, operand.stride)


def _in_turns(plain: Callable[[], Any], padded: Callable[[], Any], device: torch.device) -> Times:
    for _ in range(2):
        plain(), padded()
    once = _seconds(plain, device) + _seconds(padded, device)
    runs = min(max(int(_SECONDS / max(once, 1e-9)), _LEAST_RUNS), _MOST_RUNS)
    pairs = [(_seconds(plain, device), _seconds(padded, device)) for _ in range(runs)]
    return Times(statistics.median(first for first, _ in pairs), statistics.median(second for _, second in pairs))


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def run_padded(operator: str, operands: Sequence[torch.Tensor], padded: Sizes) -> torch.Tensor:
    """The matmul of padded operands, sliced and laid out as that of the operands is."""
    result: torch.Tensor = padded_matmul(
        getattr(_aten, operator).default, operands, padded, lambda target, *args, **kwargs: target(*args, **kwargs)
    )
    return result


def padded_matmul(
    target: Callable[..., Any],
    operands: Sequence[Any],
    padded: Sizes,
    call: Callable[..., Any],
    value_of: Callable[[Any], torch.Tensor] = lambda tensor: tensor,
) -> Any:
    """``target`` of padded operands, sliced and row-major, made by ``call``; ``value_of`` gives the tensor of a result.

    With tensors it computes, with nodes of a graph it inserts the same calls there.
    """
    rows, inner, columns = padded
    *terms, first, second = map(value_of, operands)
    batch = first.shape[:-2]
    shapes = [*([rows, columns][-term.dim() :] for term in terms), [*batch, rows, inner], [*batch, inner, columns]]
    wide = []
    for operand, shape in zip(operands, shapes, strict=True):
        widths = _padding(value_of(operand).shape, shape)
        wide.append(call(_aten.constant_pad_nd.default, operand, widths) if widths else operand)
    result = call(target, *wide)
    for dim, size in ((-2, first.shape[-2]), (-1, second.shape[-1])):
        if value_of(result).shape[dim] != size:
            result = call(_aten.slice.Tensor, result, value_of(result).dim() + dim, 0, size)
    if not is_row_major(value_of(result)):
        result = call(_aten.clone.default, result, memory_format=torch.contiguous_format)
    return result


def _padding(shape: Sequence[int], padded: Sequence[int]) -> list[int]:
    """Widths for ``constant_pad_nd``: what each dimension is short of, from the last to the first one that is short.

    A dimension of one element that is to be broadcast stays as it is.
    """
    missing = [
        0 if size == 1 else target - size for size, target in zip(reversed(shape), reversed(padded), strict=True)
    ]
    while missing and missing[-1] == 0:
        missing.pop()
    return [width for count in missing for width in (0, count)]
