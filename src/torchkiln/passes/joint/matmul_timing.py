"""Times of matmuls as they are and padded: measured once on a device, kept in memory and in the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.cache import Cache, CacheKey
from torchkiln.cache.measurements import Measurements
from torchkiln.graph.fake import is_row_major, outside_tracing
from torchkiln.target import Target

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


class TimeCache:
    """Times by :func:`key_of`: those of this process and, with ``cache``, of earlier ones."""

    def __init__(self, cache: Cache | None = None) -> None:
        self._measurements = Measurements(2, cache)

    def times(self, key: CacheKey, measure: Callable[[], Times | None]) -> Times | None:
        """What was measured before, or what ``measure`` says now."""

        def figures() -> tuple[float, float] | None:
            found = measure()
            return None if found is None else (found.plain, found.padded)

        known = self._measurements.figures(key, figures)
        return None if known is None else Times(*known)


def key_of(matmul: Matmul, padded: Sizes, target: Target) -> CacheKey:
    """All that the times of a matmul and of its padded form depend on."""
    fields = {
        "machine": _machine(matmul, target),
        "torch": torch.__version__,
        "operator": matmul.operator,
        "dtype": str(matmul.dtype),
        "operands": " ".join(f"{operand.shape}/{operand.stride}" for operand in matmul.operands),
        "padded": str(padded),
    }
    return CacheKey("matmul times", fields)


def _machine(matmul: Matmul, target: Target) -> str:
    """The machine and its precision of float32. A card's name and the number of threads are no part of a target."""
    precision = ""
    if matmul.device.type != "cuda":
        if matmul.dtype == torch.float32:
            precision = f" {target.float32_matmul}"
        return f"{target.cpu} {target.vector_bits} {torch.get_num_threads()} threads{precision}"
    if matmul.dtype == torch.float32:
        precision = " tf32" if target.card is not None and target.card.tf32 else " ieee"
    return f"{torch.cuda.get_device_name(matmul.device) if torch.cuda.is_available() else 'cuda'}{precision}"


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
