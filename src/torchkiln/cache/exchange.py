"""Entries in one file, to carry them to another machine: a zip archive, uncompressed, named by digests.

Nothing is unpacked to where a name in the archive says: an entry goes where its own key says, after it was verified.
Members must be stored and together no larger than the archive, so none can grow.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchkiln.cache.entry import MOST_BYTES, unpack
from torchkiln.cache.store import Cache
from torchkiln.errors import CacheEntryError, CacheError

_SUFFIX = ".entry"
# What Python's zipfile raises for an archive that is none, or damaged.
_DAMAGE = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OverflowError, EOFError, OSError),
    *(struct.error, zlib.error),
)


@dataclass(frozen=True)
class Imported:
    """How many entries of an archive are in the cache now, and why others are not."""

    stored: int
    refused: tuple[str, ...]


def export_entries(cache: Cache, path: Path) -> int:
    """Write every entry that can be verified to an archive; how many there are."""
    written = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for digest in sorted(file.digest for file in cache.folder.files()):
            data = cache.verified_bytes(digest)
            if data is not None:
                # A fixed date: the same entries give the same archive.
                archive.writestr(zipfile.ZipInfo(digest + _SUFFIX), data)
                written += 1
    return written


def import_entries(cache: Cache, path: Path) -> Imported:
    """Store the entries of an archive that can be verified; CacheError where it is no archive of entries."""
    stored, refused = 0, []
    with path.open("rb") as file:
        for name, data in read_archive(file):
            digest = name.removesuffix(_SUFFIX)
            try:
                unpack(data, digest, cache.secret)
            except CacheEntryError as error:
                refused.append(f"{name}: {error}")
                continue
            if cache.folder.write(digest, data):
                stored += 1
            else:
                refused.append(f"{name}: the cache cannot be written, or is too small for it")
    return Imported(stored, tuple(refused))


def read_archive(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the members, none of them verified; CacheError where it is no archive of entries."""
    try:
        whole = file.seek(0, 2)
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check(members, whole)
            for member in members:
                yield member.filename, archive.read(member)
    except _DAMAGE as error:
        raise CacheError(f"This is no archive of cache entries ({error}); make one with: kiln cache export.") from error


def _check(members: list[zipfile.ZipInfo], whole: int) -> None:
    for member in members:
        name = member.filename
        digest = name.removesuffix(_SUFFIX)
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef") or name == digest:
            raise CacheError(f"The archive has a member {name[:100]!r}, which is no entry; nothing of it is imported.")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > MOST_BYTES:
            raise CacheError(f"Member {name} of the archive is compressed or too large; nothing of it is imported.")
    if sum(member.file_size for member in members) > whole:
        raise CacheError("The members of the archive are larger than the archive; nothing of it is imported.")
