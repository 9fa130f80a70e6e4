"""What this machine can do, measured: copies of several sizes, and a matmul."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from torchkiln.debug.recording.model import Bandwidth, Limits

# Read and written together: from what stays in a core's cache to what no cache holds.
_COPIED_BYTES = (2**18, 2**21, 2**24, 2**27)
_MATMUL_SIZE = 768


def measure_limits(dtype: torch.dtype = torch.float32) -> Limits:
    """Measured now, in a fraction of a second, with as many threads as torch uses."""
    copies = []
    for amount in _COPIED_BYTES:
        source = torch.zeros(amount // 2, dtype=torch.uint8)
        target = torch.zeros_like(source)
        copies.append(Bandwidth(amount, amount / _best_seconds(partial(target.copy_, source))))
    left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    result = torch.empty_like(left)
    multiplied = _best_seconds(partial(torch.mm, left, left, out=result))
    return Limits(tuple(copies), 2 * _MATMUL_SIZE**3 / multiplied)


def _best_seconds(run: Callable[[], object]) -> float:
    """The best of some runs, of many where they are short: one that is disturbed takes a thousand times as long."""
    run()
    best, runs, begin = float("inf"), 0, time.perf_counter()
    while runs < 7 or time.perf_counter() - begin < 0.05:
        start = time.perf_counter()
        run()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best
