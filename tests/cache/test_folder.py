"""The folder: files are whole, old ones go first, and whatever is wrong with it, there is one warning and no error."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cache.keys import key, new_cache, payload
from torchkiln.cache import open_cache
from torchkiln.cache.entry import pack
from torchkiln.cache.folder import Folder, warn_once
from torchkiln.cache.store import _open
from torchkiln.config import Settings
from torchkiln.errors import CacheWarning

WHOLE = pack(key(), payload())


@pytest.fixture(autouse=True)
def _warns_anew() -> Iterator[None]:
    """Each test is like a process of its own: warnings are said again, folders are looked at again."""
    warn_once.cache_clear()
    _open.cache_clear()
    yield
    warn_once.cache_clear()
    _open.cache_clear()


def _entry_file(folder: Path, number: int = 0) -> Path:
    return folder / f"{key(number).digest}.entry"


def test_what_is_put_is_found_by_another_object(tmp_path: Path) -> None:
    assert new_cache(tmp_path / "c").get(key()) is None
    new_cache(tmp_path / "c").put(key(), payload())
    assert new_cache(tmp_path / "c").get(key()) == payload()
    assert new_cache(tmp_path / "c").get(key(1)) is None


def test_only_the_user_may_look_into_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_cache(tmp_path / "deep" / "c").put(key(), payload())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "deep" / "c").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "c").iterdir()} == {0o600}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_a_file_holds_the_payload_is_right_or_absent(tmp_path: Path, data: st.DataObject) -> None:
    cache, path, whole = new_cache(tmp_path / "c"), _entry_file(tmp_path / "c"), WHOLE
    kind = data.draw(st.sampled_from(["cut", "flip", "random", "as it was"]))
    if kind == "cut":
        content = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif kind == "flip":
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        content = bytes(byte ^ (1 << bit % 8 if k == bit // 8 else 0) for k, byte in enumerate(whole))
    else:
        content = data.draw(st.binary()) if kind == "random" else whole
    path.touch(mode=0o600)
    path.write_bytes(content)
    assert cache.get(key()) == (payload() if content == whole else None)
    cache.put(key(), payload())
    assert cache.get(key()) == payload()


def test_a_damaged_file_is_removed(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    cache.put(key(), payload())
    _entry_file(tmp_path / "c").write_bytes(b"kiln")
    assert cache.get(key()) is None
    assert not _entry_file(tmp_path / "c").exists()


def test_an_entry_of_another_key_is_not_used(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    cache.put(key(1), b"hostile")
    os.rename(_entry_file(tmp_path / "c", 1), _entry_file(tmp_path / "c", 2))
    assert cache.get(key(2)) is None


def test_an_entry_without_the_right_signature_is_not_used(tmp_path: Path) -> None:
    new_cache(tmp_path / "c").put(key(), b"unsigned")
    signing = new_cache(tmp_path / "c", secret=b"secret")
    assert signing.get(key()) is None
    signing.put(key(), b"signed")
    assert signing.get(key()) == b"signed"
    assert new_cache(tmp_path / "c", secret=b"other").get(key()) is None


# -- what is no file --------------------------------------------------------------------------------------------------


def _a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _a_socket, _a_link_to_a_device, _a_link_to_itself])
@pytest.mark.parametrize("suffix", ["entry", "lock"])
def test_what_is_no_file_is_neither_waited_for_nor_replaced(
    make: Callable[[Path], None], suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = new_cache(tmp_path / "c")
    monkeypatch.chdir(tmp_path / "c")  # the path of a socket has room for a hundred characters
    path = Path(f"{key().digest}.{suffix}")
    make(path)
    before = path.lstat()

    def use() -> tuple[bytes | None, bytes | None]:
        found = cache.get(key())
        with cache.compiling(key()) as meanwhile:
            cache.put(key(), payload())
        return found, meanwhile

    assert _within_seconds(use) == (None, None)
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    with _entry_file(tmp_path / "c").open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(1 << 40)
    assert _within_seconds(lambda: cache.get(key())) is None


def _within_seconds(run: Callable[[], Any]) -> Any:
    """What it returns; a call that hangs fails the test and not the whole suite."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(30)
    assert found, "still waiting"
    return found[0]


# -- folders that are refused -----------------------------------------------------------------------------------------


def _said(run: Callable[[], object]) -> tuple[object, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(item.message) for item in caught if item.category is CacheWarning]


def _open_twice(path: Path, **options: object) -> object:
    asked = Settings(cache_dir=str(path), **options)  # type: ignore[arg-type]
    return open_cache(asked) or open_cache(asked)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(mode)
    cache, said = _said(lambda: _open_twice(tmp_path / "c"))
    assert cache is None
    assert len(said) == 1
    assert "others may write there" in said[0]
    assert list((tmp_path / "c").iterdir()) == []


def test_a_folder_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path / "c").st_uid + 1)
    cache, said = _said(lambda: _open_twice(tmp_path / "c"))
    assert cache is None
    assert len(said) == 1
    assert "belongs to somebody else" in said[0]


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "c").symlink_to(tmp_path / "mine")
    cache, said = _said(lambda: _open_twice(tmp_path / "c"))
    assert cache is None
    assert len(said) == 1
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    cache, said = _said(lambda: _open_twice(tmp_path / "c" / "deeper"))
    assert cache is None
    assert len(said) == 1


def test_a_folder_that_others_may_write_later_is_no_longer_read(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    cache.put(key(), payload())
    (tmp_path / "c").chmod(0o777)
    assert cache.get(key()) is None
    (tmp_path / "c").chmod(0o700)
    assert cache.get(key()) == payload()


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    cache.put(key(), payload())
    _entry_file(tmp_path / "c").chmod(0o666)
    assert cache.get(key()) is None


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_secret_that_cannot_be_read_means_no_cache(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "secret").write_text(content)
    secret = str(tmp_path / "secret")
    cache, said = _said(lambda: _open_twice(tmp_path / "c", cache_secret_file=secret))
    assert cache is None
    assert len(said) == 1
    assert secret in said[0]


# The superuser, as whom tests may run, is refused nothing: a child gives its rights up first.
_AS_NOBODY = """
import os, sys, warnings
from pathlib import Path
from torchkiln.cache import CacheKey, open_cache
from torchkiln.config import Settings
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
warnings.simplefilter("always")
cache = open_cache(Settings(cache_dir=sys.argv[1]))
open_cache(Settings(cache_dir=sys.argv[1]))
for number in range(3 if cache else 0):
    key = CacheKey("graph", {"number": str(number)})
    with cache.compiling(key) as payload:
        cache.put(key, b"new")
    print(cache.get(key))
print("done")
"""


def _as_nobody(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )


def _of_nobody(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)


def test_a_folder_that_may_not_be_written_means_no_cache_and_one_warning(shared_folder: Path) -> None:
    folder = shared_folder / "c"
    folder.mkdir()
    _of_nobody(folder)
    folder.chmod(0o500)
    done = _as_nobody(folder)
    assert done.stdout.split() == ["None", "None", "None", "done"]
    assert done.stderr.count("CacheWarning") == 1
    assert "permission denied" in done.stderr


def test_a_folder_that_may_not_be_made_means_no_cache_and_one_warning(shared_folder: Path) -> None:
    _of_nobody(shared_folder)
    shared_folder.chmod(0o500)
    done = _as_nobody(shared_folder / "c" / "d")
    assert done.stdout.split() == ["done"]
    assert done.stderr.count("CacheWarning") == 1
    assert "permission denied" in done.stderr


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that another user can reach; pytest's own are the user's alone."""
    path = Path("/tmp") / f"torchkiln-test-{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir(mode=0o755)
    yield path
    path.chmod(0o700)
    shutil.rmtree(path)


# -- disks that are full ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("where", ["open", "rename"])
def test_a_folder_that_cannot_be_written_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: int, where: str
) -> None:
    cache = new_cache(tmp_path / "c")
    cache.put(key(1), payload(1))
    plain = os.open

    def refused(*given: Any, **others: Any) -> Any:
        if where == "open" and not (len(given) > 1 and given[1] & os.O_CREAT):
            return plain(*given, **others)
        raise OSError(error, os.strerror(error))

    def use() -> list[bytes | None]:
        for number in range(3):
            with cache.compiling(key(number + 2)):
                cache.put(key(number + 2), payload())
        return [cache.get(key(number)) for number in range(1, 3)]

    with monkeypatch.context() as patch:
        patch.setattr(os, where, refused)
        found, said = _said(use)
    assert found == [payload(1), None]
    assert len(said) == 1
    assert os.strerror(error).lower() in said[0]
    assert not list((tmp_path / "c").glob(".*.tmp"))


# Entries until the disk is full, and some more; "limited" sets the largest size of a file instead.
_FILL = """
import resource, sys, warnings
warnings.simplefilter("always")
from torchkiln.cache import CacheKey, open_cache
from torchkiln.config import Settings
if sys.argv[2] == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
cache = open_cache(Settings(cache_dir=sys.argv[1]))
keys = [CacheKey("graph", {"number": str(number)}) for number in range(6)]
payloads = [bytes([number]) * size for number, size in enumerate((100, 10_000, 100_000, 50_000, 100, 100))]
for key, payload in zip(keys, payloads):
    with cache.compiling(key):
        cache.put(key, payload)
found = [cache.get(key) for key in keys]
assert all(one in (None, payload) for one, payload in zip(found, payloads))
print(*(one is not None for one in found))
"""


def _filled(folder: Path, how: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", _FILL, str(folder / "c"), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def _one_warning_and_only_whole_entries(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.split() == ["True", "True", "False", "False", "False", "False"]
    assert done.stderr.count("CacheWarning") == 1


def test_a_file_that_the_system_cuts_off_is_not_kept(tmp_path: Path) -> None:
    _one_warning_and_only_whole_entries(_filled(tmp_path, "limited"))
    assert not list((tmp_path / "c").glob(".*.tmp"))


def test_a_full_disk_means_one_warning(tmp_path: Path) -> None:
    """On a disk of 64 KiB in memory; where none may be mounted, with the largest size of a file again."""
    mount = 'mount -t tmpfs -o size=64k,mode=700 tmpfs "$0" && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(tmp_path)]
    permitted = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, check=False)
    if permitted and permitted.returncode == 0:
        done = _filled(tmp_path, "full", *prefix)
        assert "no space left on device" in done.stderr
    else:
        done = _filled(tmp_path, "limited")
    _one_warning_and_only_whole_entries(done)


def test_warnings_that_are_errors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "c").chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _open_twice(tmp_path / "c") is None
    assert "others may write there" in caplog.text


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    (tmp_path / "c").rmdir()
    assert cache.get(key()) is None
    with cache.compiling(key()) as meanwhile:
        assert meanwhile is None
        cache.put(key(), payload())
    assert cache.get(key()) == payload()


# -- the limit --------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_is_removed_first(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c", limit=60_000)
    hour_ago = time.time() - 3600
    for number in range(10):  # of somewhat more than 5000 bytes
        cache.put(key(number), payload(number))
        os.utime(_entry_file(tmp_path / "c", number), (hour_ago + number, hour_ago + number))
    assert cache.get(key(0)) == payload(0)  # used now
    for number in range(10, 13):
        cache.put(key(number), payload(number))
    kept = [number for number in range(13) if _entry_file(tmp_path / "c", number).exists()]
    assert kept == sorted({0, *kept[1:]}) == [0, *range(13 - len(kept) + 1, 13)]
    assert 8 <= len(kept) <= 11
    assert sum(path.stat().st_size for path in (tmp_path / "c").glob("*.entry")) <= 60_000


def test_an_entry_larger_than_the_limit_is_not_stored(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c", limit=1000)
    cache.put(key(), payload())
    assert cache.get(key()) is None
    assert not list((tmp_path / "c").glob("*.entry"))


def test_files_are_not_looked_through_at_every_put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache, sweeps = new_cache(tmp_path / "c"), []
    monkeypatch.setattr(Folder, "sweep", lambda self: sweeps.append(1))
    for number in range(50):
        cache.put(key(number), payload(number))
    assert sweeps == [1]
    new_cache(tmp_path / "c").put(key(), payload())  # nor in every process
    assert sweeps == [1]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    old, young = (tmp_path / "c" / f".{key().digest}.{letter * 16}.tmp" for letter in "ab")
    lock, other = tmp_path / "c" / f"{key().digest}.lock", tmp_path / "c" / "notes.txt"
    for path in (old, young, lock, other):
        path.write_bytes(b"part")
    os.utime(old, (time.time() - 10_000,) * 2)
    cache.folder.sweep()
    assert [path.exists() for path in (old, young, lock, other)] == [False, True, False, True]
    cache.put(key(), payload())
    assert cache.folder.clear() == 1
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".swept", "notes.txt"]
