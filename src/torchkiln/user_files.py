"""Files of the user: the cache folder, and writing a file so that it is whole or as it was before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/torchkiln``, or ``~/.cache/torchkiln``; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "torchkiln"
    except RuntimeError:
        return None


def write_whole(path: Path, content: bytes) -> None:
    """Write ``path``, whose folder is made if it is not there; nobody sees a part of the file."""
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends, and is gone where it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # those of a file written plainly; a temporary one is the owner's alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
