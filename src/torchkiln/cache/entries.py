"""What a stage asks of a cache."""

from __future__ import annotations

from typing import Protocol

from torchkiln.cache.key import CacheKey


class Entries(Protocol):
    """Bytes by key. A value that was not stored, or was damaged since, is None."""

    def get(self, key: CacheKey, /) -> bytes | None: ...

    def put(self, key: CacheKey, value: bytes, /) -> object: ...
