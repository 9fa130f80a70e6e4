"""The cache: ``get`` and ``put`` of payloads by key, in the user's folder and, where configured, on a remote.

Whatever goes wrong with a disk, a network or an entry, a lookup gives nothing, the caller compiles, and the user reads
one warning.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from torchkiln.cache.entry import MOST_BYTES, Entry, pack, unpack, unpack_head
from torchkiln.cache.folder import Folder, StoredFile, reason, warn_once
from torchkiln.cache.key import CacheKey
from torchkiln.cache.locks import Lock
from torchkiln.config import Settings, bytes_of
from torchkiln.errors import CacheEntryError
from torchkiln.stats import TOTALS
from torchkiln.user_files import cache_folder

if TYPE_CHECKING:
    from torchkiln.cache.remote import Remote

_log = logging.getLogger(__name__)

# How long another process that compiles the same is waited for; one that was stopped costs the others this much.
WAIT_SECONDS = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05

_recorders: tuple[list[Miss], ...] = ()
_recorders_lock = threading.Lock()


@dataclass(frozen=True)
class Miss:
    """A key that was looked up in ``cache`` and not found."""

    cache: Cache
    key: CacheKey


@contextlib.contextmanager
def record_misses() -> Iterator[list[Miss]]:
    """A list to which every miss in this process is added while the block runs."""
    global _recorders
    misses: list[Miss] = []
    with _recorders_lock:
        _recorders = (*_recorders, misses)
    try:
        yield misses
    finally:
        with _recorders_lock:
            _recorders = tuple(other for other in _recorders if other is not misses)


class Cache:
    """Payloads by key. With a ``secret``, entries are signed with it, and others are not used."""

    def __init__(
        self,
        folder: Folder,
        remote: Remote | None = None,
        secret: bytes | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.folder = folder
        self._remote = remote
        self.secret = secret
        self._wait_seconds = wait_seconds
        self._held = threading.local()

    def get(self, key: CacheKey) -> bytes | None:
        """The verified payload of ``key``: from the folder, or else from the remote, which the folder then has too."""
        payload = self._from_folder(key)
        if payload is None and self._remote is not None:
            payload = self._from_remote(key, self._remote)
        if payload is None:
            TOTALS.count_in_cache("misses")
            for recorder in _recorders:
                recorder.append(Miss(self, key))
        return payload

    def put(self, key: CacheKey, payload: bytes) -> None:
        """Store a payload, in the folder now and on the remote in the background."""
        if len(payload) > MOST_BYTES:
            return
        data = pack(key, payload, self.secret)
        if self.folder.write(key.digest, data):
            TOTALS.count_in_cache("puts")
        if self._remote is not None:
            self._remote.put(key.digest, data)

    @contextlib.contextmanager
    def compiling(self, key: CacheKey) -> Iterator[bytes | None]:
        """Whose turn it is to compile: None for this thread's, bytes where another finished meanwhile.

        Others that ask for the same key wait for the end of the block, but no longer than :data:`WAIT_SECONDS`: then
        they compile too. A thread that compiles already does not wait for another key, or two could wait for each
        other.
        """
        lock, payload = self._turn(key)
        if payload is not None:
            yield payload
            return
        depth = self._depth()
        self._held.depth = depth + 1
        try:
            yield None
        finally:
            self._held.depth = depth
            if lock is not None:
                self.folder.release(lock)

    def _depth(self) -> int:
        depth: int = getattr(self._held, "depth", 0)
        return depth

    def _turn(self, key: CacheKey) -> tuple[Lock | None, bytes | None]:
        """The lock, or else a payload; neither where this thread should compile without a lock."""
        end, pause, waits = time.monotonic() + self._wait_seconds, _FIRST_PAUSE, False
        while True:
            try:
                lock = self.folder.try_lock(key.digest)
            except OSError as error:
                _log.debug("compiling without a lock: %s", error)
                return None, None
            payload = self._from_folder(key)
            if payload is not None:
                if lock is not None:
                    self.folder.release(lock)
                return None, payload
            if lock is not None or self._depth() or time.monotonic() > end:
                return lock, None
            if not waits:
                waits = True
                TOTALS.count_in_cache("waits")
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _from_folder(self, key: CacheKey) -> bytes | None:
        data = self.folder.read(key.digest)
        if data is None:
            return None
        try:
            payload = unpack(data, key.digest, self.secret).payload
        except CacheEntryError as error:
            self._refuse(key, error, str(self.folder.path))
            if error.damaged:
                self.folder.remove(key.digest)
            return None
        TOTALS.count_in_cache("hits")
        return payload

    def _from_remote(self, key: CacheKey, remote: Remote) -> bytes | None:
        data = remote.get(key.digest)
        if data is None:
            return None
        try:
            payload = unpack(data, key.digest, self.secret).payload
        except CacheEntryError as error:
            self._refuse(key, error, remote.name)
            return None
        self.folder.write(key.digest, data)
        TOTALS.count_in_cache("hits", "remote_hits")
        return payload

    def _refuse(self, key: CacheKey, error: CacheEntryError, where: str) -> None:
        TOTALS.count_in_cache("refused")
        _log.info("entry %s of %s is not used: %s", key.digest, where, error)

    def flush(self, seconds: float) -> bool:
        """Wait until the remote has what was put, but no longer than that; whether it has."""
        return self._remote is None or self._remote.flush(seconds)

    # -- for commands -------------------------------------------------------------------------------------------------

    def entry(self, digest: str) -> Entry:
        """The verified entry in the folder with this digest; CacheEntryError where it is none."""
        data = self.folder.read(digest)
        if data is None:
            raise CacheEntryError("the file cannot be read", damaged=False)
        return unpack(data, digest, self.secret)

    def verified_bytes(self, digest: str) -> bytes | None:
        """The file of an entry as it is, None where it cannot be verified."""
        data = self.folder.read(digest)
        if data is None:
            return None
        try:
            unpack(data, digest, self.secret)
        except CacheEntryError:
            return None
        return data

    def heads(self) -> Iterator[tuple[StoredFile, Entry]]:
        """Key and header of every entry in the folder, the last used first; payloads are not read."""
        for file in self.folder.files():
            with contextlib.suppress(CacheEntryError, OSError):
                head = unpack_head(self.folder.read_head(file.digest), file.digest)
                head.key, head.origin  # noqa: B018  # parsed here, where an error can be left out
                yield file, head

    def nearest(self, key: CacheKey, before: float) -> CacheKey | None:
        """The stored key of the same kind that differs from ``key`` in the fewest fields, then in the fewest lines.

        Only entries made ``before`` that time count.
        """
        stored = [
            head.key for _, head in self.heads() if head.key.kind == key.kind and head.origin.created < before
        ]
        return min((other for other in stored if other != key), key=lambda other: _distance(key, other), default=None)


def _distance(key: CacheKey, other: CacheKey) -> tuple[int, int]:
    """Fields that differ, and lines in them that only one of the two has."""
    differences = list(key.differences(other))
    lines = [
        set((difference.ours or "").splitlines()) ^ set((difference.theirs or "").splitlines())
        for difference in differences
    ]
    return len(differences), sum(map(len, lines))


# -- opening ----------------------------------------------------------------------------------------------------------


def open_cache(settings: Settings) -> Cache | None:
    """The cache that these settings describe, one object for each configuration; None where there is none.

    A folder that cannot be used, or a secret that cannot be read, mean no cache and one warning.
    """
    folder = cache_folder()
    if not settings.cache or (settings.cache_dir is None and folder is None):
        return None
    path = Path(settings.cache_dir).absolute() if settings.cache_dir is not None else Path(folder or "") / "compiled"
    limit = bytes_of(settings.cache_limit)
    return _open(path, limit, settings.cache_remote, settings.cache_secret_file, settings.cache_timeout)


@lru_cache(maxsize=64)
def _open(path: Path, limit: int, remote: str, secret_file: str | None, timeout: float) -> Cache | None:
    try:
        secret = _secret(secret_file)
    except OSError as error:
        warn_once(
            f"There is no cache, since the secret in {secret_file} cannot be used ({reason(error)}); set"
            " cache_secret_file to a file with a secret, or KILN_CACHE=0."
        )
        return None
    folder = Folder(path, limit)
    try:
        folder.prepare()
    except OSError as error:
        warn_once(
            f"There is no cache, since {path} cannot be used ({reason(error)}); set cache_dir to a"
            " folder of your own, or KILN_CACHE=0."
        )
        return None
    return Cache(folder, _remote(remote, timeout), secret)


def _secret(path: str | None) -> bytes | None:
    if path is None:
        return None
    secret = Path(path).read_bytes().strip()
    if not secret:
        raise OSError("it is empty")
    return secret


def _remote(url: str, timeout: float) -> Remote | None:
    if not url:
        return None
    from torchkiln.cache.remote import Remote  # imported only where there is one

    return Remote(url, timeout)
