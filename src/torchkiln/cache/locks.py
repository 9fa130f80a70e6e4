"""Locks between processes and threads: who compiles what, by ``flock`` on a file beside the entry.

The kernel releases a lock when its holder dies, however it dies. Each lock is an open file of its own, so threads of
one process exclude each other too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat


class Lock:
    """A lock that is held until :meth:`release`: a name in the folder, and the file that is locked."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._process = os.getpid()

    def release(self, folder: int | None) -> None:
        """Let others have it; ``folder`` is a descriptor of its folder, None where that is gone.

        A forked child only closes its copy: the lock is the parent's.
        """
        if os.getpid() == self._process:
            # Removed while it is still held: whoever waits for this file finds that it has no name and takes a new one.
            if folder is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._name, dir_fd=folder)
            with contextlib.suppress(OSError):  # a forked child may keep a copy open; closing ours would not release it
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def try_lock(folder: int, name: str) -> Lock | None:
    """The lock of this name in the folder with this descriptor, or None while another has it.

    OSError where there can be no locks.
    """
    while True:
        descriptor = _open(folder, name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(folder, name, descriptor):
                return Lock(name, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between our opening and locking it


def remove_abandoned(folder: int, name: str) -> None:
    """Remove the file of a lock that nobody holds: its holder was killed."""
    with contextlib.suppress(OSError):
        lock = try_lock(folder, name)
        if lock is not None:
            lock.release(folder)


def _open(folder: int, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{name} is no regular file")
    return descriptor


def _is_named(folder: int, name: str, descriptor: int) -> bool:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
