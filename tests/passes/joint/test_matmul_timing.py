"""Times of matmuls: measured for real, kept in the cache, and an entry that holds something else is ignored."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from torchkiln.cache import Cache, open_cache
from torchkiln.config import Settings
from torchkiln.errors import CacheWarning
from torchkiln.passes.joint.matmul_timing import (
    Matmul,
    Operand,
    TimeCache,
    Times,
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


def _cache(path: Path) -> Cache:
    cache = open_cache(Settings(cache_dir=str(path)))
    assert cache is not None
    return cache


def _measured() -> Times:
    return Times(2.0, 1.0)


def _again() -> Times:
    raise AssertionError("measured again")


def test_times_go_to_the_cache_and_come_back(tmp_path: Path) -> None:
    padded = (4095, 4096, 4104)
    key, other = key_of(_matmul(4095, 4095, 4097), padded, TARGET), key_of(_matmul(999, 999, 999), padded, TARGET)
    assert TimeCache(_cache(tmp_path / "deep")).times(key, lambda: Times(2.0, 1.0)) == Times(2.0, 1.0)
    assert TimeCache(_cache(tmp_path / "deep")).times(other, lambda: Times(3.0, 1.0)) == Times(3.0, 1.0)
    known = TimeCache(_cache(tmp_path / "deep"))
    assert known.times(key, _again) == Times(2.0, 1.0)
    assert known.times(other, _again) == Times(3.0, 1.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1",
        b"null",
        b'"os.system"',
        b"[1]",
        b"[1, 2, 3]",
        b"[true, 2]",
        b"[[1], 2]",
        b"\x00\x01",
        b"\xff\xfe\x00",
        b"[-1, 2]",
        b"[0, 2]",
        b"[NaN, 2]",
        b"[1, Infinity]",
        b"[1e999, 2]",
        pytest.param(b"[1" + b"0" * 400 + b", 2]", id="beyond float"),
        pytest.param(b"[" + b"1" * 5000 + b", 2]", id="beyond int"),
        pytest.param(b"[" * 200_000, id="nested"),
        pytest.param(b'{"a":' * 200_000, id="nested objects"),
    ],
)
def test_an_entry_without_times_is_done_without_and_replaced(tmp_path: Path, content: bytes) -> None:
    key = key_of(_matmul(4095, 4095, 4097), (1, 2, 3), TARGET)
    _cache(tmp_path / "cache").put(key, content)
    assert TimeCache(_cache(tmp_path / "cache")).times(key, _measured) == Times(2.0, 1.0)
    assert TimeCache(_cache(tmp_path / "cache")).times(key, _again) == Times(2.0, 1.0)


def test_what_cannot_be_measured_is_not_stored(tmp_path: Path) -> None:
    key = key_of(_matmul(9, 9, 9), (1, 2, 3), TARGET)
    assert TimeCache(_cache(tmp_path / "cache")).times(key, lambda: None) is None
    assert TimeCache(_cache(tmp_path / "cache")).times(key, _measured) == Times(2.0, 1.0)


def test_a_full_disk_leaves_the_old_times_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known, new = (key_of(_matmul(size, size, size), (1, 2, 3), TARGET) for size in (9, 8))
    TimeCache(_cache(tmp_path / "cache")).times(known, _measured)

    def full(*given: object, **others: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.warns(CacheWarning, match="no space left"):
        found = TimeCache(_cache(tmp_path / "cache")).times(new, _measured)
    assert found == Times(2.0, 1.0)
    assert [path.name for path in (tmp_path / "cache").glob("*.entry")] == [f"{known.digest}.entry"]
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_without_a_cache_times_are_kept_in_memory() -> None:
    known, key = TimeCache(), key_of(_matmul(9, 9, 9), (1, 2, 3), TARGET)
    assert known.times(key, _measured) == Times(2.0, 1.0)
    assert known.times(key, _again) == Times(2.0, 1.0)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert open_cache(Settings()) is None


def test_many_threads_at_once_leave_times_that_can_be_read(tmp_path: Path) -> None:
    keys = [key_of(_matmul(size, 8, 8), (1, 2, 3), TARGET) for size in range(100, 125)]

    def write() -> None:
        known = TimeCache(_cache(tmp_path / "cache"))
        for key in keys:
            known.times(key, _measured)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = TimeCache(_cache(tmp_path / "cache"))
    assert {known.times(key, _again) for key in keys} == {Times(2.0, 1.0)}


def test_the_key_has_all_a_time_depends_on() -> None:
    matmul = _matmul(64, 63, 65)
    others = [
        _matmul(64, 63, 66),
        _matmul(64, 63, 65, torch.bfloat16),
        _matmul(64, 63, 65, transposed=True),
        Matmul("mm", torch.device("cpu"), matmul.dtype, matmul.operands),
    ]
    keys = [key_of(item, (64, 64, 72), TARGET) for item in [matmul, *others]] + [key_of(matmul, (64, 64, 80), TARGET)]
    assert len({key.digest for key in keys}) == 6


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
