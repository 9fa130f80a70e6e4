"""What this machine can do, measured: copies of several sizes, and a matmul."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from torchkiln.debug.recording.model import Bandwidth, Kernel, LibraryCall, Limits, Recording

# Read and written together: from what stays in a core's cache to what no cache holds.
_COPIED_BYTES = (2**18, 2**21, 2**24, 2**27)
_MATMUL_SIZE = 768
_ROUNDS = 3


def measure_limits(dtype: torch.dtype = torch.float32) -> Limits:
    """Measured now, in less than a second, with as many threads as torch uses.

    Each is the best of rounds that lie apart: others may have the cores for a whole one.
    """
    sources = [torch.zeros(amount // 2, dtype=torch.uint8) for amount in _COPIED_BYTES]
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    runs: list[Callable[[], object]] = [partial(torch.zeros_like(source).copy_, source) for source in sources]
    runs.append(partial(torch.mm, left, left, out=torch.empty_like(left)))
    *copied, multiplied = (
        min(times) for times in zip(*(map(_best_seconds, runs) for _ in range(_ROUNDS)), strict=True)
    )
    copies = (Bandwidth(amount, amount / best) for amount, best in zip(_COPIED_BYTES, copied, strict=True))
    return Limits(tuple(copies), 2 * _MATMUL_SIZE**3 / multiplied)


def raised_limits(limits: Limits, recording: Recording) -> Limits:
    """``limits``, but none lower than what a kernel or call of the recording reached."""
    most_operations, bandwidths = limits.operations_per_second, list(limits.bandwidths)
    work: list[Kernel | LibraryCall] = []
    for one in recording.compilations:
        work += (*one.kernels, *one.library_calls)
    for item in work:
        if item.seconds:
            most_operations = max(most_operations, item.operations / item.seconds)
            place = limits.place_of(item.bytes / (item.launches if isinstance(item, Kernel) else 1))
            reached = max(bandwidths[place].bytes_per_second, item.bytes / item.seconds)
            bandwidths[place] = Bandwidth(bandwidths[place].bytes, reached)
    return Limits(tuple(bandwidths), most_operations)


def _best_seconds(run: Callable[[], object]) -> float:
    """The best of some runs, of many where they are short: one that is disturbed takes a thousand times as long."""
    run()
    best, runs, begin = float("inf"), 0, time.perf_counter()
    while runs < 5 or time.perf_counter() - begin < 0.02:
        start = time.perf_counter()
        run()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best
