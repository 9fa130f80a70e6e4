"""Archives of entries: they carry entries from one cache to another, and hostile ones change nothing."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.keys import key, new_cache, payload
from torchkiln.cache.entry import pack
from torchkiln.cache.exchange import export_entries, import_entries, read_archive
from torchkiln.errors import CacheError


def _archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def _name(number: int) -> str:
    return f"{key(number).digest}.entry"


def test_entries_are_carried_to_another_cache(tmp_path: Path) -> None:
    first, second = new_cache(tmp_path / "first"), new_cache(tmp_path / "second")
    for number in range(3):
        first.put(key(number), payload(number))
    (tmp_path / "first" / _name(2)).write_bytes(b"damaged")
    assert export_entries(first, tmp_path / "a.zip") == 2
    done = import_entries(second, tmp_path / "a.zip")
    assert (done.stored, done.refused) == (2, ())
    assert [second.get(key(number)) for number in range(3)] == [payload(0), payload(1), None]
    export_entries(second, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_entries_that_cannot_be_verified_are_refused_one_by_one(tmp_path: Path) -> None:
    members = {
        _name(1): pack(key(1), payload(1), b"secret"),
        _name(2): pack(key(3), payload(3), b"secret"),
        _name(4): pack(key(4), payload(4)),
        _name(5): pack(key(5), payload(5), b"secret")[:-1],
    }
    cache = new_cache(tmp_path / "c", secret=b"secret")
    done = import_entries(cache, _archive(tmp_path / "a.zip", members))
    assert done.stored == 1
    assert [line.split(":")[0] for line in done.refused] == [_name(2), _name(4), _name(5)]
    assert [path.name for path in (tmp_path / "c").glob("*.entry")] == [_name(1)]


@pytest.mark.parametrize(
    "name", ["../evil.entry", "/tmp/evil.entry", f"../{'a' * 61}.entry", "a" * 64, f"{'A' * 64}.entry", "x" * 9999]
)
def test_an_archive_with_any_other_name_in_it_is_refused_whole(tmp_path: Path, name: str) -> None:
    cache = new_cache(tmp_path / "c")
    path = _archive(tmp_path / "a.zip", {_name(1): pack(key(1), payload(1)), name: b"evil"})
    with pytest.raises(CacheError):
        import_entries(cache, path)
    assert not list((tmp_path / "c").iterdir())


def test_an_archive_that_grows_is_refused_whole(tmp_path: Path) -> None:
    cache = new_cache(tmp_path / "c")
    path = _archive(tmp_path / "a.zip", {_name(1): bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CacheError, match="compressed"):
        import_entries(cache, path)


def test_an_archive_whose_members_overlap_is_refused_whole(tmp_path: Path) -> None:
    plain = _archive(tmp_path / "a.zip", {_name(1): bytes(10_000)}).read_bytes()
    record = plain[plain.index(b"PK\x01\x02") : plain.index(b"PK\x05\x06")]  # of its one member
    end = bytearray(plain[plain.index(b"PK\x05\x06") :])
    end[8:12] = (50).to_bytes(2, "little") * 2
    end[12:16] = (50 * len(record)).to_bytes(4, "little")
    (tmp_path / "b.zip").write_bytes(plain[: plain.index(b"PK\x01\x02")] + 50 * record + bytes(end))
    assert len(zipfile.ZipFile(tmp_path / "b.zip").infolist()) == 50
    with pytest.raises(CacheError, match="larger than the archive"):
        import_entries(new_cache(tmp_path / "c"), tmp_path / "b.zip")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_are_an_archive_or_refused_with_one_error(data: st.DataObject) -> None:
    whole = bytearray(_WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for candidate in (bytes(whole), content, data.draw(st.binary())):
        try:
            members = list(read_archive(BytesIO(candidate)))
        except CacheError:
            continue
        assert sum(len(member) for _, member in members) <= len(candidate)


def _whole() -> bytes:
    memory = BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_name(1)), pack(key(1), b"small"))
        archive.writestr(zipfile.ZipInfo(_name(2)), pack(key(2), b"small"))
    return memory.getvalue()


_WHOLE = _whole()
