"""Keys, payloads and caches for tests of the cache."""

from __future__ import annotations

from pathlib import Path

from torchkiln.cache import Cache, CacheKey
from torchkiln.cache.folder import Folder


def key(number: int = 0, kind: str = "graph") -> CacheKey:
    return CacheKey(kind, {"graph": f"x = placeholder()\ny = relu(x, {number})", "torch": "2.13.0"})


def payload(number: int = 0, size: int = 5000) -> bytes:
    """Bytes that tell which number they are of."""
    return (f"payload {number} ".encode() * size)[:size]


def new_cache(path: Path, limit: int = 1 << 30, secret: bytes | None = None, wait_seconds: float = 60.0) -> Cache:
    """A cache of its own: what another object has in memory is not shared."""
    folder = Folder(path, limit)
    folder.prepare()
    return Cache(folder, secret=secret, wait_seconds=wait_seconds)
