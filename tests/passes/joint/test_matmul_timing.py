"""Times of matmuls: measured for real, kept in a file, and a file that is something else is ignored."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchkiln.config import Settings
from torchkiln.passes.joint.matmul_timing import (
    Matmul,
    Operand,
    TimeCache,
    Times,
    cache_file,
    key_of,
    measure_on_device,
    run_padded,
)
from torchkiln.target import capture_target

TARGET = capture_target(Settings())


def _matmul(
    rows: int, inner: int, columns: int, dtype: torch.dtype = torch.float16, transposed: bool = False
) -> Matmul:
    first = Operand((rows, inner), (1, rows) if transposed else (inner, 1))
    return Matmul("mm", torch.device("cuda", 0), dtype, (first, Operand((inner, columns), (columns, 1))))


def test_times_go_to_a_file_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "times.json"
    matmul, padded = _matmul(4095, 4095, 4097), (4095, 4096, 4104)
    assert TimeCache(path).times(key_of(matmul, padded, TARGET), lambda: Times(2.0, 1.0)) == Times(2.0, 1.0)
    other = _matmul(999, 999, 999)
    assert TimeCache(path).times(key_of(other, padded, TARGET), lambda: Times(3.0, 1.0)) == Times(3.0, 1.0)
    content = json.loads(path.read_text())
    assert content == {key_of(matmul, padded, TARGET): [2.0, 1.0], key_of(other, padded, TARGET): [3.0, 1.0]}
    assert [item.name for item in path.parent.iterdir()] == ["times.json"]

    def again() -> Times:
        raise AssertionError("measured again")

    assert TimeCache(path).times(key_of(matmul, padded, TARGET), again) == Times(2.0, 1.0)


def _measured() -> Times:
    return Times(2.0, 1.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"null",
        b'{"key": "os.system"}',
        b'{"key": [1]}',
        b'{"key": [true, 2]}',
        b'{"key": [[1], 2]}',
        b"\x00\x01",
        b"\xff\xfe\x00",
        b'{"\xff": [1, 2]}',
        b'{"key": [-1, 2]}',
        b'{"key": [0, 2]}',
        b'{"key": [NaN, 2]}',
        b'{"key": [1, Infinity]}',
        b'{"key": [1e999, 2]}',
        pytest.param(b'{"key": [1' + b"0" * 400 + b", 2]}", id="beyond float"),
        pytest.param(b'{"key": [' + b"1" * 5000 + b", 2]}", id="beyond int"),
        pytest.param(b"[" * 200_000, id="nested"),
        pytest.param(b'{"a":' * 200_000, id="nested objects"),
        pytest.param(b'{"a": [1, 2]' + b" " * (8 << 20) + b"}", id="long"),
    ],
)
def test_a_file_that_is_none_is_done_without_and_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content)
    matmul = _matmul(4095, 4095, 4097)
    assert TimeCache(path).times(key_of(matmul, (1, 2, 3), TARGET), _measured) == Times(2.0, 1.0)
    assert json.loads(path.read_text()) == {key_of(matmul, (1, 2, 3), TARGET): [2.0, 1.0]}


def test_good_times_beside_bad_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"bad": [NaN, 1], "good": [3, 4.5]}')
    matmul = _matmul(4095, 4095, 4097)
    TimeCache(path).times(key_of(matmul, (1, 2, 3), TARGET), _measured)
    assert json.loads(path.read_text()) == {"good": [3.0, 4.5], key_of(matmul, (1, 2, 3), TARGET): [2.0, 1.0]}


def _a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _an_endless_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("make", [Path.mkdir, _a_pipe, _a_socket, _a_link_to_itself, _a_link_to_a_device])
def test_what_is_no_file_is_neither_waited_for_nor_replaced(
    make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has room for a hundred characters
    path = Path("times.json")
    make(path)
    before = path.lstat()
    matmul = _matmul(4095, 4095, 4097)
    assert _within_seconds(lambda: TimeCache(path).times(key_of(matmul, (1, 2, 3), TARGET), _measured)) == Times(
        2.0, 1.0
    )
    if make is not _a_link_to_itself:  # which leads to no file, as a link whose file is gone does
        assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    _an_endless_file(path)
    known = TimeCache(path)
    assert _within_seconds(lambda: known.times(key_of(_matmul(9, 9, 9), (1, 2, 3), TARGET), _measured)) == Times(
        2.0, 1.0
    )


def _within_seconds(run: Callable[[], object]) -> object:
    """What it returns; a call that hangs fails the test and not the whole suite."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(20)
    assert found, "still waiting"
    return found[0]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    TimeCache(path).times(key_of(_matmul(9, 9, 9), (1, 2, 3), TARGET), _measured)
    before = path.read_text()

    def full(*given: object, **others: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "chmod", full)  # between the write and the rename
    assert TimeCache(path).times(key_of(_matmul(8, 8, 8), (1, 2, 3), TARGET), _measured) == Times(2.0, 1.0)
    assert path.read_text() == before
    assert [item.name for item in tmp_path.iterdir()] == ["times.json"]


def test_a_file_or_a_folder_that_may_not_be_read_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*given: object, **others: object) -> None:
        raise PermissionError(errno.EACCES, "permission denied")

    for name in ("stat", "open", "replace"):  # the superuser, as whom tests may run, is refused nothing
        path = tmp_path / name / "times.json"
        TimeCache(path).times(key_of(_matmul(9, 9, 9), (1, 2, 3), TARGET), _measured)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refused)
            assert TimeCache(path).times(key_of(_matmul(8, 8, 8), (1, 2, 3), TARGET), _measured) == Times(2.0, 1.0)


def test_many_writers_at_once_leave_a_file_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    caches = [TimeCache(path) for _ in range(4)]

    def write(cache: TimeCache, start: int) -> None:
        for size in range(start, start + 25):
            cache.times(key_of(_matmul(size, 8, 8), (1, 2, 3), TARGET), _measured)

    threads = [threading.Thread(target=write, args=(c, 100 * k)) for k, c in enumerate(caches, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = json.loads(path.read_text())
    assert set(map(tuple, content.values())) == {(2.0, 1.0)}
    assert [item.name for item in tmp_path.iterdir()] == ["times.json"]


def test_a_user_without_a_home_keeps_times_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_file() is None


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    known = TimeCache(tmp_path / "file" / "times.json")
    assert known.times(key_of(_matmul(9, 9, 9), (1, 2, 3), TARGET), lambda: Times(2.0, 1.0)) == Times(2.0, 1.0)


def test_the_key_has_all_a_time_depends_on() -> None:
    matmul = _matmul(64, 63, 65)
    others = [
        _matmul(64, 63, 66),
        _matmul(64, 63, 65, torch.bfloat16),
        _matmul(64, 63, 65, transposed=True),
        Matmul("mm", torch.device("cpu"), matmul.dtype, matmul.operands),
    ]
    keys = {key_of(item, (64, 64, 72), TARGET) for item in [matmul, *others]} | {key_of(matmul, (64, 64, 80), TARGET)}
    assert len(keys) == 6


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "torchkiln" / "matmul_times.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "torchkiln" / "matmul_times.json"


def test_measuring_is_real_and_draws_none_of_the_users_numbers() -> None:
    operands = (Operand((65, 33), (1, 65)), Operand((33, 31), (31, 1)))
    matmul = Matmul("mm", torch.device("cpu"), torch.float32, operands)
    state = torch.get_rng_state()
    times = measure_on_device(matmul, (68, 36, 32))
    assert times is not None
    assert 0 < times.plain < 1
    assert 0 < times.padded < 1
    assert torch.equal(torch.get_rng_state(), state)
    x, y = torch.ones(3, 65, 33), torch.ones(3, 33, 31)
    torch.testing.assert_close(run_padded("bmm", [x, y], (68, 36, 32)), torch.bmm(x, y))
