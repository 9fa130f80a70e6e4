"""Compiled copies of one graph, one for each combination of inputs that comes along."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

_MOST_COPIES = 64


class CopiesByKey:
    """Compiled copies by what they were compiled for; the one used longest ago is dropped beyond 64.

    Safe to use from several threads: a copy is compiled by one of them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._copies: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def get(self, key: Hashable, compile_copy: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The copy for ``key``, compiled on first need."""
        with self._lock:
            if key not in self._copies:
                self._copies[key] = compile_copy()
                if len(self._copies) > _MOST_COPIES:
                    self._copies.popitem(last=False)
            self._copies.move_to_end(key)
            return self._copies[key]
