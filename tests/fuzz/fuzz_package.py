"""Random bytes for the parsers of packages: ``make fuzz-packages MINUTES=10``.

Whatever the bytes, a parser gives a result or raises an error that it documents; anything else ends the run. Nothing
that was parsed is loaded. Members of half of the archives have right checksums, which random bytes never would.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

import atheris
import torch

import torchkiln

with atheris.instrument_imports():
    from torchkiln.aot.archive import FORMAT, METADATA, WEIGHTS, Archive
    from torchkiln.aot.package import read_contents
    from torchkiln.aot.safetensors import read_header, tensor_at
    from torchkiln.aot.signature import signature_from_json
    from torchkiln.artifact import decode_function, decode_support
    from torchkiln.errors import ArtifactError, PackageError

_DOCUMENTED = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_FILE = os.memfd_create("package")
_PATH = f"/proc/self/fd/{_FILE}"


def _read_archive(content: bytes) -> None:
    os.ftruncate(_FILE, 0)
    os.pwrite(_FILE, content, 0)
    with contextlib.suppress(PackageError), Archive(_PATH) as archive, archive.errors():
        archive.verify()
        read_contents(archive)


def _read_with_right_checksums(data: bytes) -> None:
    """The bytes as metadata, function and weights of an archive that is otherwise right."""
    provider = atheris.FuzzedDataProvider(data)
    names = ("native/function", "native/support", WEIGHTS)
    members = {name: provider.ConsumeBytes(provider.ConsumeIntInRange(0, 400)) for name in names}
    try:
        given = json.loads(provider.ConsumeUnicodeNoSurrogates(2000))
    except (ValueError, RecursionError):
        return
    metadata = {**given, "format": FORMAT} if isinstance(given, dict) else {"format": FORMAT}
    metadata["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    with contextlib.suppress(RecursionError):
        members[METADATA] = json.dumps(metadata).encode()
        whole = BytesIO()
        with zipfile.ZipFile(whole, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        _read_archive(whole.getvalue())


def _read_weights(data: bytes) -> None:
    content = memoryview(bytearray(data))
    with contextlib.suppress(*_DOCUMENTED):
        for stored in read_header(content).values():
            tensor_at(content, stored)


def _read_signature(data: bytes) -> None:
    with contextlib.suppress(*_DOCUMENTED):
        signature_from_json(json.loads(data))


def _read_artifacts(data: bytes) -> None:
    for decode in (decode_function, decode_support):
        with contextlib.suppress(ArtifactError):
            decode(data)


_PARSERS = (_read_archive, _read_with_right_checksums, _read_weights, _read_signature, _read_artifacts)


def parse(data: bytes) -> None:
    """One input: its first byte chooses the parser."""
    if data:
        _PARSERS[data[0] % len(_PARSERS)](data[1:])


def _write_examples(folder: Path) -> None:
    """Inputs to begin with: the parts of a real package."""
    path = folder / "package.kiln"
    torchkiln.aot_compile(torch.nn.Linear(2, 3), (torch.ones(4, 2),), path=path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    signature = json.dumps(json.loads(members[METADATA])["signature"]).encode()
    contents = (path.read_bytes(), b"", members[WEIGHTS], signature, members["native/function"])
    path.unlink()
    for number, content in enumerate(contents):
        (folder / f"example{number}").write_bytes(bytes([number]) + content)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _write_examples(Path(folder))
        atheris.Setup([*sys.argv, folder], parse)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
