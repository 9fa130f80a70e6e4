"""What a machine does in a second on one thread: measured once for all processes, and rounded.

What is saved for backward depends on these figures, so they must be the same whenever the same program is compiled for
the same target. A figure is rounded to a power of two and kept in a file under the user's cache folder
(``$XDG_CACHE_HOME/torchkiln/rates``, or ``~/.cache/torchkiln/rates``), by what the target says of the processor and of
matmuls, and by the version of torch. The first process to write it decides. Where there is no folder to write to,
rounding alone keeps processes together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from torchkiln.graph.fake import outside_tracing
from torchkiln.target import Target
from torchkiln.user_files import cache_folder

_MATMUL_SIZE = 192
_COPIED_ELEMENTS = 1 << 20
_REPETITIONS = 9


@cache
def flops_per_second(target: Target, dtype: torch.dtype) -> float:
    """Floating-point operations of a matmul."""

    def measure() -> float:
        left = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
        return 2 * _MATMUL_SIZE**3 / best_seconds(lambda: left @ left, _REPETITIONS)

    return stored_rate(target, f"operations of {dtype}", measure)


@cache
def bandwidth(target: Target) -> float:
    """Bytes read and written."""

    def measure() -> float:
        source = torch.ones(_COPIED_ELEMENTS)
        destination = torch.empty_like(source)
        return 2 * source.nbytes / best_seconds(lambda: destination.copy_(source), _REPETITIONS)

    return stored_rate(target, "bytes", measure)


def best_seconds(run: Callable[[], object], repetitions: int) -> float:
    """The shortest run on one thread, after a first one that is not counted."""
    threads = torch.get_num_threads()
    best = float("inf")
    torch.set_num_threads(1)
    try:
        run()
        for _ in range(repetitions):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return max(best, 1e-9)


def stored_rate(target: Target, what: str, measure: Callable[[], float]) -> float:
    """The figure of an earlier process, or else that of ``measure``, rounded and stored."""
    key = f"{target.processor} {target.float32_matmul} torch {torch.__version__} {what}"
    folder = cache_folder() or Path(os.devnull)  # in which nothing can be written
    path = folder / "rates" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    found = _read(path)
    if found is not None:
        return found
    with outside_tracing():
        rate = rounded(measure())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"machine": target.cpu, "a second": what, "rate": rate}, file)
            os.link(temporary, path)  # fails where another process was first
        finally:
            os.unlink(temporary)
    found = _read(path)
    return rate if found is None else found


def rounded(rate: float) -> float:
    """The power of two nearest to ``rate``: runs on a busy machine differ by less, mostly."""
    return 2.0 ** round(math.log2(rate))


def _read(path: Path) -> float | None:
    try:
        rate = json.loads(path.read_text())["rate"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return float(rate) if isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0 else None
