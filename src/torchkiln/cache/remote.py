"""Remotes: entries shared between machines, on any filesystem that fsspec knows or in Redis.

A remote never stalls a compilation. A lookup waits as long as ``cache_timeout`` and no longer; storing happens in the
background. After a few failures in a row a remote is left alone for the rest of the process. fsspec and Redis are
imported when an entry is first looked up or stored. What comes from a remote is verified by whoever asked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from torchkiln.cache.entry import MOST_BYTES
from torchkiln.cache.folder import warn_once
from torchkiln.errors import first_line

_log = logging.getLogger(__name__)

_MOST_FAILURES = 3
_MOST_WAITING = 64  # entries to be stored; more are not
_MOST_WAITING_BYTES = 256 << 20
_EXIT_SECONDS = 5.0

_URL = re.compile(r"[a-z][\w+.:-]*://", re.IGNORECASE)
_REDIS = re.compile(r"rediss?://|unix://")


class Client(Protocol):
    """What a remote is to this module: bytes by name, with whatever exceptions its library raises."""

    def get(self, name: str) -> bytes | None: ...

    def put(self, name: str, data: bytes) -> None: ...


class _Filesystem:
    """A folder on a filesystem of fsspec."""

    def __init__(self, url: str) -> None:
        fsspec = importlib.import_module("fsspec")
        # Instances are not shared with the user's: theirs may be used in a process that forks.
        self._files, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        protocol = self._files.protocol
        self._is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(name), start=0, end=MOST_BYTES + 1))
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if not self._is_local:  # where a reader sees an object whole or not at all
            self._files.pipe_file(path, data)
            return
        self._files.makedirs(self._root, exist_ok=True)
        temporary = f"{path}.{os.urandom(8).hex()}"
        try:
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.rm(temporary)
            raise

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}.entry"


class _Redis:
    """A database of Redis. What it removes, and when, is a matter of its own configuration."""

    def __init__(self, url: str, timeout: float) -> None:
        redis = importlib.import_module("redis")
        self._client = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)

    def get(self, name: str) -> bytes | None:
        # GETRANGE and not GET: a value of any size takes bounded memory. It gives no bytes for what is not there.
        # A URL may ask for text (decode_responses), which bytes() refuses.
        return bytes(self._client.getrange(f"torchkiln:{name}", 0, MOST_BYTES)) or None

    def put(self, name: str, data: bytes) -> None:
        self._client.set(f"torchkiln:{name}", data)


def _connect(url: str, timeout: float) -> Client:
    if not _URL.match(url):  # fsspec would take it for a path below the current folder
        raise ValueError("it is no URL")
    return _Redis(url, timeout) if _REDIS.match(url) else _Filesystem(url)


class Remote:
    """The remote at ``url``; ``timeout`` is how many seconds a lookup may take."""

    def __init__(self, url: str, timeout: float, connect: Callable[[str, float], Client] = _connect) -> None:
        self.name = _without_password(url)
        self._url = url
        self._timeout = timeout
        self._connect = connect
        self._off = False
        self.start()
        _remotes.add(self)

    def start(self) -> None:
        """As at the beginning of a process: no connection, no thread."""
        self._client: Client | None = None
        self._failures = 0
        self._lock = threading.Lock()
        self._sender: _Sender | None = None

    def get(self, name: str) -> bytes | None:
        """The bytes of that name, unverified; None where there are none, or no answer in time."""
        client = self._connected()
        if client is None:
            return None
        answer: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put(client.get(name))
            except Exception as error:  # of whatever library the remote needs
                answer.put(error)

        # A thread for each lookup: one that hangs is left behind and holds up no other.
        try:
            threading.Thread(target=ask, name="torchkiln cache lookup", daemon=True).start()
            found = answer.get(timeout=self._timeout)
        except (queue.Empty, RuntimeError):  # RuntimeError: the process ends, or has too many threads
            found = TimeoutError(f"no answer in {self._timeout:g} s")
        if isinstance(found, Exception):
            self._failed(found)
            return None
        self._failures = 0
        return found

    def put(self, name: str, data: bytes) -> None:
        """Store bytes in the background; dropped where too many wait already."""
        client = self._connected()
        if client is None:
            return
        with self._lock:
            if self._sender is None:
                self._sender = _Sender(client, self._failed)
            sender = self._sender
        sender.send(name, data)

    @property
    def is_off(self) -> bool:
        """Whether it failed too often and is left alone."""
        return self._off

    def flush(self, seconds: float) -> bool:
        """Wait until what was put is stored, but no longer than that; whether it is."""
        sender = self._sender
        return sender is None or sender.flush(seconds)

    def _connected(self) -> Client | None:
        """The client; None where this remote is left alone. Nothing is sent yet: clients connect when first used."""
        if self._off:
            return None
        with self._lock:
            if self._client is None:
                try:
                    self._client = self._connect(self._url, self._timeout)
                except ImportError as error:
                    self._give_up(
                        f"needs a package that is not installed ({first_line(error).rstrip('.')})",
                        "install it with: pip install 'torchkiln[remote]'",
                    )
                except Exception as error:  # of whatever library the remote needs
                    self._give_up(f"cannot be used ({_shown(error)})", "correct cache_remote")
            return self._client

    def _failed(self, error: Exception) -> None:
        _log.info("the remote cache %s: %s", self.name, _shown(error))
        self._failures += 1
        if self._failures >= _MOST_FAILURES and not self._off:
            self._give_up(
                f"failed {_MOST_FAILURES} times in a row ({_shown(error)})",
                "check that it can be reached, raise cache_timeout, or set KILN_CACHE_REMOTE=''",
            )

    def _give_up(self, why: str, way_out: str) -> None:
        self._off = True
        warn_once(f"The remote cache {self.name} {why} and is left alone in this process; {way_out}.")


class _Sender:
    """A thread that stores entries, in order."""

    def __init__(self, client: Client, failed: Callable[[Exception], None]) -> None:
        self._client = client
        self._failed = failed
        self._waiting: dict[str, bytes] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="torchkiln cache sender", daemon=True).start()

    def send(self, name: str, data: bytes) -> None:
        with self._changed:
            waiting = sum(map(len, self._waiting.values()))
            if len(self._waiting) >= _MOST_WAITING or waiting + len(data) > _MOST_WAITING_BYTES:
                _log.info("entry %s is not sent: too many wait", name)
                return
            self._waiting[name] = data
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, max(end - time.monotonic(), 0))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                name, data = next(iter(self._waiting.items()))
            try:
                self._client.put(name, data)
            except Exception as error:  # of whatever library the remote needs
                self._failed(error)
            with self._changed:
                if self._waiting.get(name) is data:
                    del self._waiting[name]
                self._changed.notify_all()


def _without_password(url: str) -> str:
    return re.sub(r"(?<=://)[^/@]*@", "", url)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


# -- the end of the process, and its forks ----------------------------------------------------------------------------

_remotes: weakref.WeakSet[Remote] = weakref.WeakSet()


def _flush_all() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for remote in list(_remotes):
        if not remote.is_off:
            remote.flush(max(end - time.monotonic(), 0))


def _start_again() -> None:
    """In a forked child: threads and connections are the parent's."""
    for remote in list(_remotes):
        remote.start()


atexit.register(_flush_all)
os.register_at_fork(after_in_child=_start_again)
