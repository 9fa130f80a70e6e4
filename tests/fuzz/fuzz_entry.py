"""Random bytes for the parsers of cache entries and of archives of them: ``make fuzz MINUTES=10``.

Whatever the bytes, a parser gives a result or raises the one error it documents; anything else ends the run. The
checksum of half of the inputs is made right first, since random bytes would never get past it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import atheris

with atheris.instrument_imports():
    import zipfile

    from torchkiln.cache import CacheKey
    from torchkiln.cache.entry import PREFIX_BYTES, Entry, head_bytes, pack, unpack, unpack_head
    from torchkiln.cache.exchange import read_archive
    from torchkiln.cache.key import digest_of
    from torchkiln.errors import CacheEntryError, CacheError

_KEY = CacheKey("graph", {"graph": "x = placeholder()", "torch": "2.13.0"})
_START, _CHECKED_FROM = 16, 80
_SECRET = b"secret"


def _with_right_checksum(data: bytes) -> bytes:
    checksum = hashlib.sha256(data[:_START] + data[_CHECKED_FROM:]).digest()
    return data[: _CHECKED_FROM - 32] + checksum + data[_CHECKED_FROM:]


def _key_of(data: bytes) -> str:
    """The digest that an entry with these bytes has to be asked for by."""
    size = int.from_bytes(data[_CHECKED_FROM : _CHECKED_FROM + 4], "little")
    return digest_of(data[PREFIX_BYTES : PREFIX_BYTES + size])


def _read_whole(entry: Entry) -> None:
    for part in ("key", "origin"):
        with contextlib.suppress(CacheEntryError):
            getattr(entry, part)


def _parse_entry(data: bytes) -> None:
    for digest in (_KEY.digest, _key_of(data)):
        for secret in (None, _SECRET):
            with contextlib.suppress(CacheEntryError):
                _read_whole(unpack(data, digest, secret))
        with contextlib.suppress(CacheEntryError):
            _read_whole(unpack_head(data, digest))
    with contextlib.suppress(CacheEntryError):
        head_bytes(data)


def _parse_archive(data: bytes) -> None:
    with contextlib.suppress(CacheError):
        for _, member in read_archive(BytesIO(data)):
            _parse_entry(member)


def parse(data: bytes) -> None:
    """One input: its first byte chooses the parser."""
    if data[:1] and data[0] % 4 == 0:
        _parse_archive(data[1:])
    elif data[:1] and data[0] % 4 == 1:
        _parse_entry(data[1:])
    else:
        _parse_entry(_with_right_checksum(data[1:]))


def _examples() -> list[bytes]:
    entries = [pack(_KEY, b"payload"), pack(_KEY, b"payload", _SECRET)]
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"{_KEY.digest}.entry", entries[0])
    return [b"\x00" + archive.getvalue(), *(which + entry for which in (b"\x01", b"\x02") for entry in entries)]


def main() -> None:
    # libFuzzer ends the process, so the folder of examples to begin with is not removed by a block around it.
    corpus = Path(tempfile.mkdtemp(prefix="torchkiln-fuzz-"))
    for number, example in enumerate(_examples()):
        (corpus / str(number)).write_bytes(example)
    atheris.Setup([*sys.argv, str(corpus)], parse)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
