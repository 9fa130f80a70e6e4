"""Times of matrix products as they are and padded: measured once on a device, kept in memory and in a file.

The file is JSON under the user's cache folder (``$XDG_CACHE_HOME/torchkiln``, or ``~/.cache/torchkiln``). It is only
ever replaced as a whole, so readers never see half of one. What cannot be read or written, or is no file of times, is
done without and never waited for; what is there and is no regular file (a folder, a pipe, a device) is left alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A tensor as a measurement needs it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(value: torch.Tensor) -> Operand:
        return Operand(tuple(value.shape), tuple(value.stride()))


@dataclass(frozen=True)
class Product:
    """A matrix product: ``mm`` or ``bmm`` of two operands, or ``addmm`` of a term and two operands."""

    operator: str
    device: torch.device
    dtype: torch.dtype
    operands: tuple[Operand, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K and N: rows of the first matrix, columns of it, columns of the second."""
        first, second = self.operands[-2:]
        return first.shape[-2], first.shape[-1], second.shape[-1]


@dataclass(frozen=True)
class Times:
    """Seconds of a product as it is, and with its operands padded and its result cut."""

    plain: float
    padded: float


Measure = Callable[[Product, tuple[int, int, int]], Times | None]
"""Times of a product and of the same with M, K and N padded to these sizes; None where they cannot be taken."""


# A line of the file takes about 200 bytes, so this is 20,000 products. A file that is longer is not read, and replaced.
_MOST_BYTES = 4 << 20


def cache_file() -> Path | None:
    """Where times are kept from one process to the next; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "torchkiln" / "product_times.json"


@dataclass
class TimeCache:
    """Times by product. With ``path``, those of earlier processes are read at the first question."""

    path: Path | None = None
    _times: dict[str, Times | None] = field(default_factory=dict)
    _read: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def times(self, product: Product, padded: tuple[int, int, int], measure: Measure) -> Times | None:
        """What was measured before, or what ``measure`` says now."""
        key = key_of(product, padded)
        with self._lock:
            if not self._read:
                self._times = {**_load(self.path), **self._times}
                self._read = True
            if key not in self._times:
                found = measure(product, padded)
                self._times[key] = found
                if found is not None:
                    self._store(key, found)
            return self._times[key]

    def _store(self, key: str, found: Times) -> None:
        if self.path is None:
            return
        together = {**_load(self.path), key: found}  # others may have written since
        content = {name: [times.plain, times.padded] for name, times in sorted(together.items())}
        with contextlib.suppress(OSError):
            if self.path.exists() and not self.path.is_file():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(content, file, indent=0)
                os.replace(temporary, self.path)
            except BaseException:
                os.unlink(temporary)
                raise


def key_of(product: Product, padded: tuple[int, int, int]) -> str:
    """All that a time depends on, as text."""
    operands = " ".join(f"{operand.shape}/{operand.stride}" for operand in product.operands)
    kernels = f"{_device_name(product.device)} torch {torch.__version__}{_reduced_precision(product)}"
    return f"{kernels} {product.operator} {product.dtype} {operands} to {padded}"


def _reduced_precision(product: Product) -> str:
    """Settings of torch that choose other kernels."""
    if product.device.type != "cuda" or product.dtype != torch.float32:
        return ""
    return f" {torch.get_float32_matmul_precision()}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    return device.type


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
    if not isinstance(value, list) or len(value) != 2:
        return None
    if not all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value):
        return None
    try:
        plain, padded = map(float, value)
    except OverflowError:
        return None
    return Times(plain, padded) if 0 < plain < math.inf and 0 < padded < math.inf else None


# -- measuring --------------------------------------------------------------------------------------------------------

_SECONDS = 0.02
_LEAST_RUNS, _MOST_RUNS = 5, 200


def measure_on_device(product: Product, padded: tuple[int, int, int]) -> Times | None:
    """Run both forms in turns on the device of the product, on numbers that leave the user's generators alone."""
    if product.device.type == "cuda" and (not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing()):
        return None
    with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        try:
            operands = [_random(operand, product) for operand in product.operands]
            return _in_turns(
                lambda: run_plain(product.operator, operands),
                lambda: run_padded(product.operator, operands, padded),
                product.device,
            )
        except torch.OutOfMemoryError:
            return None


def _random(operand: Operand, product: Product) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True))
    generator = torch.Generator(product.device).manual_seed(0)
    memory = torch.randn(extent, generator=generator, device=product.device, dtype=torch.float32).to(product.dtype)
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


def run_plain(operator: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = getattr(_aten, operator).default(*operands)
    return result


def run_padded(operator: str, operands: Sequence[torch.Tensor], padded: tuple[int, int, int]) -> torch.Tensor:
    """The product of padded operands, cut and laid out as that of the operands is."""
    *terms, first, second = operands
    rows, inner, columns = padded
    wide = [
        *(_padded_to(term, [rows, columns][-term.dim() :]) for term in terms),
        _padded_to(first, [*first.shape[:-2], rows, inner]),
        _padded_to(second, [*second.shape[:-2], inner, columns]),
    ]
    result = run_plain(operator, wide)
    return result[..., : first.shape[-2], : second.shape[-1]].contiguous()


def _padded_to(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    widths = padding(value.shape, shape)
    result: torch.Tensor = _aten.constant_pad_nd.default(value, widths) if any(widths) else value
    return result


def padding(shape: Sequence[int], padded: Sequence[int]) -> list[int]:
    """Widths for ``constant_pad_nd``: what each dimension is short of, from the last to the first.

    A dimension of one element that is to be broadcast stays as it is.
    """
    return [
        width
        for size, target in zip(reversed(shape), reversed(padded), strict=True)
        for width in (0, 0 if size == 1 else target - size)
    ]
