"""The folder of the cache: one file for each entry, whole or absent, and what was not used for longest goes first.

The folder is the user's alone. It is opened and checked for every operation, and files are reached through that
descriptor, so nobody can put another folder in its place in between. A file is written beside its place and renamed.
It is not flushed to the disk: after a power failure it may be cut off or empty, and then its checksum says so; flushing
would make every compilation wait for the disk.

Files that are not regular (folders, pipes, devices, links) are left alone, whatever their name, and never waited for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torchkiln.cache.entry import MOST_BYTES, PREFIX_BYTES, head_bytes
from torchkiln.cache.locks import Lock, remove_abandoned, try_lock
from torchkiln.errors import CacheWarning, warn_user

_log = logging.getLogger(__name__)

_ENTRY = re.compile(r"([0-9a-f]{64})\.entry")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_LOCK = re.compile(r"[0-9a-f]{64}\.lock")
_SWEPT = ".swept"  # a file whose time is that of the last look at all files

# Writing an entry takes milliseconds; a temporary file of this age was left by a process that was killed.
_TEMPORARY_SECONDS = 600
# All files are looked at once in this time, and after this share of the limit was written by this process: that takes
# 0.12 s for 10,000 entries on a busy machine with two cores.
_SWEEP_SECONDS = 3600
_SWEEP_SHARE = 1 / 32
_KEEP_SHARE = 0.9  # of the limit remains when something is removed
# These pass by themselves; others mean that this folder cannot be written.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.EINTR, errno.EAGAIN)


@dataclass(frozen=True)
class StoredFile:
    """The file of an entry: the digest it is named after, its bytes and when it was last read or written."""

    digest: str
    size: int
    used: float


@cache
def warn_once(message: str) -> None:
    """Warn, once in a process. Where warnings are errors it is logged: the cache stops nobody."""
    try:
        warn_user(message, CacheWarning)
    except CacheWarning:
        _log.warning(message)


class Folder:
    """Entries as files below ``path``, ``limit`` bytes of them at most."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self._writes = True
        self._written = 0
        self._sweeping = threading.Lock()

    def prepare(self) -> None:
        """Make the folder if it is not there; OSError, with the reason, where it cannot be used."""
        with contextlib.suppress(FileExistsError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
        with self.opened():
            pass

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the folder, which was found to be the user's alone; else OSError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise OSError(error.errno, "it is a link or no folder") from error
            raise
        try:
            _check_owner(os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, digest: str) -> bytes | None:
        """The bytes of an entry, which counts as used now; None where there is none that can be read."""
        try:
            with self.opened() as folder, _open_regular(folder, f"{digest}.entry") as file:
                size = os.fstat(file).st_size
                if size > MOST_BYTES:
                    return None
                with contextlib.suppress(OSError):  # a folder may be for reading alone
                    os.utime(file)
                return _read(file, size)
        except OSError as error:
            if error.errno != errno.ENOENT:
                _log.debug("entry %s cannot be read: %s", digest, error)
            return None

    def read_head(self, digest: str) -> bytes:
        """The first bytes of an entry, up to its payload; it does not count as used."""
        with self.opened() as folder, _open_regular(folder, f"{digest}.entry") as file:
            prefix = _read(file, PREFIX_BYTES)
            return prefix + _read(file, head_bytes(prefix) - PREFIX_BYTES)

    def write(self, digest: str, data: bytes) -> bool:
        """Store an entry, in place of another of that name; False where that failed, which is said once."""
        if not self._writes or len(data) > min(self.limit, MOST_BYTES):
            return False
        try:
            self._write(digest, data)
        except FileNotFoundError:  # the folder was removed
            try:
                self.prepare()
                self._write(digest, data)
            except OSError as error:
                return self._failed(error)
        except OSError as error:
            return self._failed(error)
        self._sweep_at_times(len(data))
        return True

    def _write(self, digest: str, data: bytes) -> None:
        temporary, name = f".{digest}.{os.urandom(8).hex()}.tmp", f"{digest}.entry"
        with self.opened() as folder:
            if not _may_replace(folder, name):
                raise OSError(errno.EEXIST, f"{name} is no regular file")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(data)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _unlink(folder, temporary)
                raise

    def _failed(self, error: OSError) -> bool:
        if error.errno in (*_PASSING, errno.EEXIST):
            _log.debug("an entry is not stored: %s", error)
            return False
        self._writes = False
        warn_once(
            f"Nothing more is stored in the cache {self.path} ({reason(error)}); make room, allow writing there, or set"
            " cache_dir to another folder or KILN_CACHE=0."
        )
        return False

    def remove(self, digest: str) -> None:
        """Remove an entry, if it is there."""
        with contextlib.suppress(OSError), self.opened() as folder:
            if _may_replace(folder, f"{digest}.entry"):
                _unlink(folder, f"{digest}.entry")

    def files(self) -> list[StoredFile]:
        """The files of all entries, the last used first; OSError where the folder cannot be read."""
        with self.opened() as folder:
            return _entries(_regular_files(folder))

    def clear(self) -> int:
        """Remove all entries and what killed processes left; how many entries there were."""
        removed = 0
        with self.opened() as folder:
            for name, _ in _regular_files(folder):
                if any(pattern.fullmatch(name) for pattern in (_ENTRY, _TEMPORARY, _LOCK)):
                    removed += _unlink(folder, name) and _ENTRY.fullmatch(name) is not None
        return removed

    def try_lock(self, digest: str) -> Lock | None:
        """The lock of an entry, or None while another thread or process has it; OSError where there can be none."""
        with self.opened() as folder:
            return try_lock(folder, f"{digest}.lock")

    def release(self, lock: Lock) -> None:
        """Let others have the lock."""
        try:
            with self.opened() as folder:
                lock.release(folder)
        except OSError:
            lock.release(None)

    # -- the limit ----------------------------------------------------------------------------------------------------

    def _sweep_at_times(self, written: int) -> None:
        self._written += written
        if not self._sweeping.acquire(blocking=False):  # another thread is at it
            return
        try:
            with self.opened() as folder:
                if self._written < self.limit * _SWEEP_SHARE and not _is_older(folder, _SWEPT, _SWEEP_SECONDS):
                    return
                self._written = 0
                _set_time(folder, _SWEPT)
            self.sweep()
        except OSError as error:
            _log.debug("the cache %s was not looked through: %s", self.path, error)
        finally:
            self._sweeping.release()

    def sweep(self) -> None:
        """Remove what killed processes left, and the entries that were not used for longest beyond the limit."""
        now = time.time()
        with self.opened() as folder:
            found = list(_regular_files(folder))
            for name, status in found:
                if _LOCK.fullmatch(name):
                    remove_abandoned(folder, name)
                elif _TEMPORARY.fullmatch(name) and now - status.st_mtime > _TEMPORARY_SECONDS:
                    _unlink(folder, name)
            files = _entries(found)
            total = sum(file.size for file in files)
            if total <= self.limit:
                return
            for file in reversed(files):
                if total <= self.limit * _KEEP_SHARE:
                    break
                if _unlink(folder, f"{file.digest}.entry"):
                    total -= file.size


def reason(error: OSError) -> str:
    """Why, without the number and the path that Python puts around it."""
    return (error.strerror or str(error)).lower()


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to somebody else")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others may write there: chmod 700 it")


@contextlib.contextmanager
def _open_regular(folder: int, name: str) -> Iterator[int]:
    """A descriptor to read a file that only this user can have written; else OSError, without waiting for a writer."""
    # Asked before it is opened too: opening a device may do something.
    _check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        _check_regular(status)
        _check_owner(status)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")


def _read(file: int, size: int) -> bytes:
    """Up to ``size`` bytes; fewer where the file ends."""
    parts = []
    while size > 0 and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _may_replace(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def _regular_files(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as items:
        for item in items:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                status = item.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield item.name, status


def _entries(found: Iterable[tuple[str, os.stat_result]]) -> list[StoredFile]:
    """Those that are files of entries, the last used first."""
    files = [
        StoredFile(match[1], status.st_size, status.st_mtime)
        for name, status in found
        if (match := _ENTRY.fullmatch(name))
    ]
    return sorted(files, key=lambda file: (-file.used, file.digest))


def _unlink(folder: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _is_older(folder: int, name: str, seconds: float) -> bool:
    try:
        return time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > seconds
    except FileNotFoundError:
        return True


def _set_time(folder: int, name: str) -> None:
    """Make an empty file, or set the time of the one that is there to now."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)
