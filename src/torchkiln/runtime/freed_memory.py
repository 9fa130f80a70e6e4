"""What the C library does with freed memory: it keeps as much as steps of compiled functions take.

Results of a graph, what it saves for backward and what library calls give it come from the C library. glibc gives freed
memory back to the system once there is twice as much as the largest block freed before, and the next step faults every
4 KB of it in again. Whether a program gets there depends on what else it freed: one step of focal loss on 512 x 1000
took 0.5 ms in some processes and 1.8 ms, with 968 faults, in others. With the limits raised, in training on 2 cores:
mish 5.1 -> 3.2 ms, rotary embedding 5.3 -> 3.2 ms; ConvNeXt in bfloat16, eight images, one thread, whose linear layers
of oneDNN allocate what they give: 6,400 faults a call and none, 187 -> 176 ms. Blocks above 32 MiB are always mapped:
BERT's embedding still faults 23,000 pages a step. Peak memory does not grow by this, only what a process holds between
steps.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# Numbers of ``mallopt``, and the largest threshold it takes for blocks that are mapped one by one.
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20
# What glibc comes to by itself after a block of the largest size, and the largest it is set to.
_LEAST, _MOST = 2 * _LARGEST_BLOCK, (1 << 31) - 1
# Smaller blocks are on the heap from the start.
_WORTH_IT = 128 << 10
# Blocks of weights that are mapped one by one while weights are prepared.
_BLOCK_OF_WEIGHTS = 1 << 20
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")

Mallopt = Callable[[int, int], int]


class FreedMemory:
    """The limits of this process; they are only ever raised, and not touched where the environment sets them."""

    def __init__(self, mallopt: Mallopt | None) -> None:
        self._mallopt = None if any(name in os.environ for name in _OF_THE_USER) else mallopt
        self._kept = 0

    def keep(self, nbytes: int) -> None:
        """Keep freed memory of up to twice ``nbytes``, which a graph has at a time in each call."""
        wanted = min(max(2 * nbytes, _LEAST), _MOST)
        if self._mallopt is None or nbytes < _WORTH_IT or wanted <= self._kept:
            return
        if not self._kept:
            self._mallopt(_MAP_THRESHOLD, _LARGEST_BLOCK)
        self._mallopt(_TRIM_THRESHOLD, wanted)
        self._kept = wanted

    @contextmanager
    def blocks_apart(self, nbytes: int) -> Iterator[None]:
        """Inside, where ``nbytes`` are allocated, blocks are mapped one by one: one that is freed goes back at once.

        On the heap they leave holes between those that stay: freezing 605 MB of weights took up to 2.27 times their
        memory at the peak and 1.28 after it, and takes 1.95 and 0.94 so. Less than glibc may keep anyway is left alone.
        """
        if self._mallopt is None or nbytes < _LEAST:
            yield
            return
        self._mallopt(_MAP_THRESHOLD, _BLOCK_OF_WEIGHTS)
        try:
            yield
        finally:  # glibc no longer moves a limit that was set
            self._mallopt(_MAP_THRESHOLD, _LARGEST_BLOCK)
            self._kept = max(self._kept, _LEAST)
            self._mallopt(_TRIM_THRESHOLD, self._kept)


@cache
def freed_memory() -> FreedMemory:
    """That of this process; it does nothing where the C library is not glibc."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version") or not hasattr(process, "mallopt"):
        return FreedMemory(None)
    return FreedMemory(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(("mallopt", process)))
