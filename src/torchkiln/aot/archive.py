"""The file of a package: a zip archive of stored members, with a checksum of each in its metadata.

    metadata.json          format, versions, targets, signature, SHA-256 of every other member
    TARGET/function        the compiled function for one target, as the codec writes it
    TARGET/support         the support functions for it
    weights.safetensors    starts at a page of the file, to be mapped

Nothing is extracted: members are read by name, and none may be compressed or encrypted, so that an archive is never
larger in memory than it is on disk.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torchkiln.errors import KilnError, PackageError
from torchkiln.user_files import writing_whole

FORMAT = 3
METADATA, WEIGHTS = "metadata.json", "weights.safetensors"

# Files of equal content are equal: members have the earliest date that zip knows.
_DATE = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\3\4"
# An extra field that says nothing, as others use it to align members, and the one of lengths of 8 bytes.
_PADDING, _PADDING_HEAD, _LONG_LENGTHS = 0xD935, 4, 20
# The largest page of the machines that packages are for.
_PAGE = 65536
_ENCRYPTED = 0x1


def write_archive(
    path: Path, metadata: Mapping[str, Any], members: Mapping[str, bytes], weights: Iterable[bytes | memoryview]
) -> None:
    """Write a package whole; ``weights`` are the parts of the safetensors file."""
    with writing_whole(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        digests = {name: _write(archive, name, [content]) for name, content in members.items()}
        digests[WEIGHTS] = _write(archive, WEIGHTS, weights, padding=_padding(file))
        content = {"format": FORMAT, **metadata, "sha256": digests}
        _write(archive, METADATA, [json.dumps(content, indent=1).encode()])


def _write(archive: zipfile.ZipFile, name: str, parts: Iterable[bytes | memoryview], padding: bytes = b"") -> str:
    """Add a member; the digest of its content."""
    info = zipfile.ZipInfo(name, _DATE)
    info.extra = padding
    digest = hashlib.sha256()
    with archive.open(info, "w", force_zip64=True) as member:
        for part in parts:
            member.write(part)
            digest.update(part)
    return digest.hexdigest()


def _padding(file: BinaryIO) -> bytes:
    """The extra field by which the content of the weights starts at a page."""
    fixed = _LOCAL_HEADER.size + len(WEIGHTS) + _LONG_LENGTHS + _PADDING_HEAD
    zeros = -(file.tell() + fixed) % _PAGE
    return struct.pack("<2H", _PADDING, zeros) + bytes(zeros)


class Archive:
    """A package's file, open for reading; :class:`PackageError` for one that is damaged or no package."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):  # a device may have no end
            raise PackageError(f"The package {self.path!r} cannot be opened: it is no file.")
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115, closed with the archive
        except OSError as error:
            raise PackageError(f"The package {self.path!r} cannot be opened: {error.strerror}.") from error
        try:
            self._zip = zipfile.ZipFile(self._file)
            self._members = self._listed()
            self.metadata = self._metadata()
            self._digests: Mapping[str, str] = dict(self.metadata["sha256"])
            if set(self._digests) != set(self._members) - {METADATA}:
                raise ValueError("its members are not those that it lists")
        except PackageError:
            self._file.close()
            raise
        except Exception as error:
            self._file.close()
            raise self.damaged(error) from error

    def damaged(self, error: BaseException) -> PackageError:
        """What to raise where the content is not what a package holds."""
        return PackageError(
            f"The file {self.path!r} is no package or a damaged one ({type(error).__name__}: {error});"
            " copy or compile it again."
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what goes wrong with the content inside as :class:`PackageError`."""
        try:
            yield
        except PackageError:
            raise
        except KilnError as error:  # code for another process, or that calls what this one does not have
            raise PackageError(f"The package {self.path!r} cannot be loaded: {error}") from error
        except Exception as error:
            raise self.damaged(error) from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._file.close()

    def _listed(self) -> dict[str, zipfile.ZipInfo]:
        found: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            if info.filename in found:
                raise ValueError(f"it has two members {info.filename!r}")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError(f"its member {info.filename!r} is compressed")
            if info.flag_bits & _ENCRYPTED:
                raise ValueError(f"its member {info.filename!r} is encrypted")
            found[info.filename] = info
        return found

    def _metadata(self) -> dict[str, Any]:
        metadata = json.loads(self._zip.read(self._members[METADATA]))
        if not isinstance(metadata, dict) or "format" not in metadata:
            raise ValueError("its metadata is none of a package")
        if metadata["format"] != FORMAT:
            raise PackageError(
                f"The package {self.path!r} has format {metadata['format']}, this version of torchkiln reads"
                f" {FORMAT}; compile it again."
            )
        return metadata

    def read(self, name: str) -> bytes:
        """The content of a member, which is as it was written."""
        try:
            content = self._zip.read(self._members[name])
        except Exception as error:
            raise self.damaged(error) from error
        self._compare(name, hashlib.sha256(content).hexdigest())
        return content

    def map_weights(self) -> tuple[mmap.mmap, int, int]:
        """The file mapped from the page on where the weights begin, copied where it is written to; begin and length.

        Processes that map the same package share its memory until they write to it. The content is not compared with
        its checksum: that would read all of it.
        """
        try:
            begin, length = self._place(self._members[WEIGHTS])
            page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(self._file.fileno(), begin - page + length, access=mmap.ACCESS_COPY, offset=page)
        except Exception as error:
            raise self.damaged(error) from error
        return mapped, begin - page, length

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Where the content of a member lies in the file."""
        self._file.seek(info.header_offset)
        head = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        if head[0] != _LOCAL_MAGIC:
            raise ValueError(f"the member {info.filename!r} is not where it should be")
        begin = info.header_offset + _LOCAL_HEADER.size + head[-2] + head[-1]
        if begin + info.file_size > os.fstat(self._file.fileno()).st_size:
            raise ValueError(f"the member {info.filename!r} is cut off")
        return begin, info.file_size

    def verify(self) -> None:
        """Read everything and compare it with its checksum."""
        for name in self._digests:
            digest = hashlib.sha256()
            try:
                with self._zip.open(self._members[name]) as member:
                    while part := member.read(1 << 20):
                        digest.update(part)
            except Exception as error:
                raise self.damaged(error) from error
            self._compare(name, digest.hexdigest())

    def _compare(self, name: str, digest: str) -> None:
        if digest != self._digests.get(name):
            raise self.damaged(ValueError(f"the checksum of {name} is another"))
