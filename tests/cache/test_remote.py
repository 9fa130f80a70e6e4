"""Remotes: entries are shared through them and verified, and one that fails or hangs stops nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cache.keys import key, payload
from tests.cache.servers import redis_server, s3_server
from torchkiln.cache import Cache
from torchkiln.cache import remote as remote_module
from torchkiln.cache.entry import pack
from torchkiln.cache.folder import Folder, warn_once
from torchkiln.cache.remote import Client, Remote
from torchkiln.errors import CacheWarning
from torchkiln.stats import reset_stats, stats


@pytest.fixture(autouse=True)
def _warns_anew() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def _cache(folder: Path, url: str, *, secret: bytes | None = None, timeout: float = 30.0) -> Cache:
    """A cache of a machine of its own; the timeout is that of a test on a busy machine."""
    local = Folder(folder, 1 << 30)
    local.prepare()
    return Cache(local, Remote(url, timeout), secret)


def _shares(url: str, folder: Path) -> None:
    """What one machine stores, another finds, keeps, and finds again without the remote."""
    first, second = _cache(folder / "first", url), _cache(folder / "second", url)
    assert first.get(key()) is None
    first.put(key(), payload())
    assert first.flush(30)
    reset_stats()
    assert second.get(key()) == payload()
    assert second.get(key()) == payload()
    counts = stats().cache
    assert (counts.hits, counts.remote_hits, counts.misses) == (2, 1, 0)
    assert second.get(key(1)) is None


def _refuses_forgeries(url: str, folder: Path, store: Callable[[str, bytes], object]) -> None:
    """``store`` puts bytes of somebody else's on the remote."""
    reset_stats()
    store(key(5).digest, pack(key(6), b"hostile"))
    store(key(7).digest, pack(key(7), b"not signed"))
    store(key(8).digest, pack(key(8), payload())[:-1])
    store(key(9).digest, pack(key(9), payload(), b"secret"))
    signing = _cache(folder / "signing", url, secret=b"secret")
    assert [signing.get(key(number)) for number in (5, 7, 8, 9)] == [None, None, None, payload()]
    assert stats().cache.refused == 3
    assert len(list((folder / "signing").glob("*.entry"))) == 1


def test_a_folder_on_a_shared_disk(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared/kiln"
    _shares(url, tmp_path)
    assert [path.name for path in (tmp_path / "shared" / "kiln").iterdir()] == [f"{key().digest}.entry"]
    shared = tmp_path / "shared" / "kiln"
    _refuses_forgeries(url, tmp_path, lambda name, data: (shared / f"{name}.entry").write_bytes(data))


def test_memory(tmp_path: Path) -> None:
    _shares(f"memory://kiln-{os.getpid()}", tmp_path)


def test_redis(tmp_path: Path) -> None:
    import redis

    with redis_server(tmp_path) as (url, _):
        _shares(url, tmp_path)
        client = redis.Redis.from_url(url)
        assert client.keys() == [f"torchkiln:{key().digest}".encode()]
        _refuses_forgeries(url, tmp_path, lambda name, data: client.set(f"torchkiln:{name}", data))


def test_redis_asked_for_text_is_a_failure_of_the_remote(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        first, second = _cache(tmp_path / "first", url), _cache(tmp_path / "second", f"{url}?decode_responses=True")
        first.put(key(), payload())
        assert first.flush(30)
        assert second.get(key()) is None


def test_redis_that_ends_in_mid_run_is_left_alone_after_one_warning(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, server):
        cache = _cache(tmp_path / "c", url)
        cache.put(key(0), payload(0))
        assert cache.flush(30)
        server.kill()
        server.wait()
        found, said = _said(lambda: [cache.get(key(number)) for number in range(1, 8)])
        assert found == [None] * 7
        assert len(said) == 1
        assert "3 times in a row" in said[0]
        cache.put(key(1), payload(1))
        assert cache.get(key(1)) == payload(1)  # from the folder
        assert cache.flush(30)


def test_redis_that_hangs_stops_nobody_for_longer_than_the_timeout(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, server):
        cache = _cache(tmp_path / "c", url, timeout=0.2)
        assert cache.get(key(0)) is None
        server.send_signal(signal.SIGSTOP)
        try:
            found, said = _said(lambda: [cache.get(key(number)) for number in range(1, 8)])
        finally:
            server.send_signal(signal.SIGCONT)
        assert found == [None] * 7
        assert len(said) == 1


def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    with s3_server() as address:
        for name, value in {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("kiln")
        _shares("s3://kiln/compiled", tmp_path)
        assert files.ls("kiln/compiled") == [f"kiln/compiled/{key().digest}.entry"]
        _refuses_forgeries(
            "s3://kiln/compiled", tmp_path, lambda name, data: files.pipe_file(f"kiln/compiled/{name}.entry", data)
        )


# -- clients that misbehave -------------------------------------------------------------------------------------------


class _Hangs:
    """A client that answers when ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.puts: list[str] = []

    def get(self, name: str) -> bytes | None:
        self.go.wait(60)
        return None

    def put(self, name: str, data: bytes) -> None:
        self.go.wait(60)
        self.puts.append(name)


def _with_client(folder: Path, client: Client, timeout: float = 0.05) -> Cache:
    local = Folder(folder, 1 << 30)
    local.prepare()
    return Cache(local, Remote("test://remote", timeout, lambda url, timeout: client))


def _said(run: Callable[[], object]) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(item.message) for item in caught if item.category is CacheWarning]


def test_a_remote_that_never_answers_is_asked_three_times(tmp_path: Path) -> None:
    client = _Hangs()
    cache = _with_client(tmp_path / "c", client)
    asked: list[str] = []
    plain, client.get = client.get, lambda name: asked.append(name) or plain(name)  # type: ignore[func-returns-value]
    found, said = _said(lambda: [cache.get(key(number)) for number in range(6)])
    client.go.set()
    assert found == [None] * 6
    end = time.monotonic() + 30
    while len(asked) < 3 and time.monotonic() < end:  # threads that ask may start late on a busy machine
        time.sleep(0.01)
    assert len(asked) == 3
    assert len(said) == 1
    assert "no answer in 0.05 s" in said[0]


def test_storing_waits_for_nothing_and_is_done_in_the_end(tmp_path: Path) -> None:
    client = _Hangs()
    cache = _with_client(tmp_path / "c", client)
    for number in range(5):
        cache.put(key(number), payload(number))
    assert client.puts == []
    assert not cache.flush(0.01)
    client.go.set()
    assert cache.flush(30)
    assert client.puts == [key(number).digest for number in range(5)]


def test_what_waits_to_be_stored_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_MOST_WAITING", 10)
    client = _Hangs()
    cache = _with_client(tmp_path / "c", client)
    for number in range(30):
        cache.put(key(number), payload(number))
    client.go.set()
    assert cache.flush(30)
    assert len(client.puts) == 10


class _Fails:
    def get(self, name: str) -> bytes | None:
        raise RuntimeError("the library says so.\nAnd more.")

    def put(self, name: str, data: bytes) -> None:
        raise RuntimeError("the library says so.")


def test_whatever_a_library_raises_is_a_failure_of_the_remote(tmp_path: Path) -> None:
    cache = _with_client(tmp_path / "c", _Fails(), timeout=30)
    _, said = _said(lambda: [cache.get(key(number)) for number in range(5)])
    assert len(said) == 1
    assert "RuntimeError: the library says so) and is left alone" in said[0]


def test_a_package_that_is_missing_is_named_once_with_the_way_out(tmp_path: Path) -> None:
    def connect(url: str, timeout: float) -> Client:
        raise ImportError("No module named 's3fs'")

    local = Folder(tmp_path / "c", 1 << 30)
    local.prepare()
    cache = Cache(local, Remote("s3://kiln", 1, connect))
    found, said = _said(lambda: [cache.put(key(), payload()), cache.get(key(1)), cache.get(key())])
    assert found == [None, None, payload()]
    assert len(said) == 1
    assert "No module named 's3fs'" in said[0]
    assert "pip install 'torchkiln[remote]'" in said[0]


@pytest.mark.parametrize("url", ["nothing://there", "redis://host:port", "://", "shared/cache"])
def test_a_url_that_means_nothing_is_said_once(tmp_path: Path, url: str) -> None:
    cache = _cache(tmp_path / "c", url)
    found, said = _said(lambda: [cache.get(key()), cache.get(key())])
    assert found == [None, None]
    assert len(said) == 1


def test_passwords_are_not_shown() -> None:
    assert Remote("redis://user:secret@host:1/0", 1).name == "redis://host:1/0"


# -- the end of a process, and forks ----------------------------------------------------------------------------------


def test_what_is_put_last_is_stored_before_the_process_ends(tmp_path: Path) -> None:
    program = f"""
import time
from tests.cache.keys import key, payload
from torchkiln.cache import open_cache, remote
from torchkiln.config import Settings
plain = remote._Filesystem.put
remote._Filesystem.put = lambda self, name, data: (time.sleep(0.2), plain(self, name, data))
cache = open_cache(Settings(cache_dir={str(tmp_path / "c")!r}, cache_remote="file://{tmp_path}/shared"))
cache.put(key(), payload())
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [f"{key().digest}.entry"]


def test_a_forked_child_has_threads_and_connections_of_its_own(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, _):
        program = f"""
import os
from pathlib import Path
from tests.cache.keys import key, payload
from tests.cache.test_remote import _cache
cache = _cache(Path({str(tmp_path / "c")!r}), {url!r})
cache.put(key(1), payload(1))
assert cache.flush(30)
if os.fork() == 0:
    cache.put(key(2), payload(2))
    assert cache.flush(30)
    os._exit(0)
assert os.wait()[1] == 0
assert cache.get(key(3)) is None
"""
        subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
        other = _cache(tmp_path / "other", url)
        assert [other.get(key(number)) for number in (1, 2)] == [payload(1), payload(2)]


def test_a_lookup_left_behind_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.cache.keys import key
from tests.cache.test_remote import _Hangs, _with_client
_with_client(Path({str(tmp_path / "c")!r}), _Hangs()).get(key())
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=55, check=True)  # it hangs for 60 s
