"""Resident memory over a long run: samples, and whether they grow by more than torch keeps of what it compiles."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# What torch keeps of each compilation, dropped or not: 97 KiB a graph in six minutes of the soak. A compiled graph that
# is not freed adds 120 (tests/test_run_time_behaviour.py), so losing half of them is too much.
_KEPT_PER_GRAPH = 140 * 1024
# Growth where nothing is compiled: what fragments of the heap come to.
_PER_MINUTE = 1 * MIB
# Memory is judged from here on: caches of torch and Python fill up before.
_WARM_SECONDS, _LEAST_SECONDS = 60.0, 120.0


@dataclass(frozen=True)
class Sample:
    seconds: float
    graphs: int
    resident: int


@dataclass(frozen=True)
class Growth:
    """Bytes a minute, by a straight line through the samples after the warm-up, and the most that is allowed."""

    per_minute: float
    limit: float
    graphs_per_minute: float

    @property
    def is_too_much(self) -> bool:
        return self.per_minute > self.limit


def sample(seconds: float, graphs: int) -> Sample:
    """Resident memory with what the allocator could give back already given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(seconds, graphs, pages * os.sysconf("SC_PAGE_SIZE"))


def growth(samples: list[Sample]) -> Growth | None:
    """None where the run was too short to tell."""
    warm = [s for s in samples if s.seconds >= _WARM_SECONDS]
    if len(warm) < 3 or warm[-1].seconds - warm[0].seconds < _LEAST_SECONDS:
        return None
    mean_time = sum(s.seconds for s in warm) / len(warm)
    mean_size = sum(s.resident for s in warm) / len(warm)
    spread = sum((s.seconds - mean_time) ** 2 for s in warm)
    slope = sum((s.seconds - mean_time) * (s.resident - mean_size) for s in warm) / spread
    graphs = (warm[-1].graphs - warm[0].graphs) / (warm[-1].seconds - warm[0].seconds) * 60
    return Growth(slope * 60, _PER_MINUTE + graphs * _KEPT_PER_GRAPH, graphs)
