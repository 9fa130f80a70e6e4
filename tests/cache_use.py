"""What ``--cache-dir`` was good for: lookups and stored entries of a run of the tests, by kind of entry.

A second run on the same folder stores nothing: a test that does has a key that changes from one process to the next.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchkiln.cache import store
from torchkiln.cache.key import CacheKey

_MOST_TESTS_NAMED = 40


class CacheUse:
    """Counts of hits, misses and stored entries in one folder, and the tests that stored something."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.storing: Counter[str] = Counter()

    @contextmanager
    def counted(self, folder: Path) -> Iterator[None]:
        """Count what happens in ``folder`` while the block runs; caches elsewhere belong to single tests."""
        get, put = store.Cache.get, store.Cache.put

        def counting_get(cache: store.Cache, key: CacheKey) -> bytes | None:
            payload = get(cache, key)
            if cache.folder.path == folder:
                self.counts[key.kind, "misses" if payload is None else "hits"] += 1
            return payload

        def counting_put(cache: store.Cache, key: CacheKey, payload: bytes) -> None:
            put(cache, key, payload)
            if cache.folder.path == folder:
                self.counts[key.kind, "stored"] += 1
                self.storing[os.environ.get("PYTEST_CURRENT_TEST", "no test").rsplit(" ", 1)[0]] += 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.Cache, "get", counting_get)
            patch.setattr(store.Cache, "put", counting_put)
            yield

    def plain(self) -> list[list[list[object]]]:
        """For xdist, which carries plain data from its workers."""
        return [[[*key, n] for key, n in self.counts.items()], [[test, n] for test, n in self.storing.items()]]

    def add(self, plain: list[list[list[object]]]) -> None:
        counts, storing = plain
        self.counts.update({(str(kind), str(what)): int(str(n)) for kind, what, n in counts})
        self.storing.update({str(test): int(str(n)) for test, n in storing})

    def lines(self) -> Iterator[str]:
        for kind in sorted({kind for kind, _ in self.counts}):
            hits, misses, stored = (self.counts[kind, what] for what in ("hits", "misses", "stored"))
            yield f"{kind:<12} {hits:>6} hits {misses:>6} misses {stored:>6} stored"
        if len(self.storing) <= _MOST_TESTS_NAMED:
            yield from (f"stored by {test}: {n}" for test, n in self.storing.most_common())
        else:
            yield f"stored by {len(self.storing)} tests"
