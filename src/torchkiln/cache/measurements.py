"""Figures that were measured once on a machine: kept in memory, and in the cache for later processes.

The key of a figure has all that it depends on: the processor, the threads, the sizes, the version of torch.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable

from torchkiln.cache.key import CacheKey
from torchkiln.cache.store import Cache

Figures = tuple[float, ...]


class Measurements:
    """Figures by key, ``count`` of them for each, above zero; those of earlier processes are in ``cache``."""

    def __init__(self, count: int, cache: Cache | None = None) -> None:
        self._count = count
        self._cache = cache
        self._known: dict[str, Figures | None] = {}
        self._lock = threading.Lock()

    def figures(self, key: CacheKey, measure: Callable[[], Figures | None]) -> Figures | None:
        """What was measured before, or what ``measure`` says now; None, where it cannot, is not stored."""
        with self._lock:
            if key.digest not in self._known:
                self._known[key.digest] = self._stored(key) or self._measured(key, measure)
            return self._known[key.digest]

    def _stored(self, key: CacheKey) -> Figures | None:
        payload = None if self._cache is None else self._cache.get(key)
        return None if payload is None else _decoded(payload, self._count)

    def _measured(self, key: CacheKey, measure: Callable[[], Figures | None]) -> Figures | None:
        found = measure()
        if found is not None and self._cache is not None:
            self._cache.put(key, json.dumps(found).encode())
        return found


def _decoded(payload: bytes, count: int) -> Figures | None:
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, list) or len(content) != count:
        return None
    if any(type(item) not in (int, float) for item in content):  # bool is an int to isinstance
        return None
    try:
        found = tuple(map(float, content))
    except OverflowError:
        return None
    return found if all(0 < figure < math.inf for figure in found) else None
