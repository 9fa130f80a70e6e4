"""Memory that LLVM's library takes: given back while nothing is compiled.

The library is a file of 180 MB, mapped 64 KB around each place that is touched. Its 700 initialisers leave 34 MiB
resident, compiling a graph 46 MiB, and nothing of it is needed once code is loaded. Pages given back are those that
hold what the file holds; the system maps them again where they are touched. Giving back takes 1 ms, and the next
compilation 2 to 5 ms more.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from mmap import PAGESIZE
from typing import Any, ClassVar

import numpy as np

_LIBRARIES = ("libllvmlite", "libLLVM")
_LOADED, _WRITABLE = 1, 2  # PT_LOAD and PF_W
_DONTNEED = 4
# Of a page's entry in pagemap: it is swapped out or in memory, and what it holds is a file's.
_IN_USE, _OF_FILE = np.uint64(0b11 << 62), np.uint64(1 << 61)
_ENTRY = 8


def release_library_pages() -> None:
    """Let go of the library's code and constants; they come back from the file where they are used next.

    Safe while other threads run that code. A segment with a changed page (breakpoints) is left alone.
    """
    segments = _segments()
    if not segments:
        return
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for address, size in segments:
            if _is_as_in_file(pagemap, address, size):
                _system().madvise(address, size, _DONTNEED)
    finally:
        os.close(pagemap)


def _is_as_in_file(pagemap: int, address: int, size: int) -> bool:
    try:
        found = os.pread(pagemap, size // PAGESIZE * _ENTRY, address // PAGESIZE * _ENTRY)
    except OSError:
        return False
    entries = np.frombuffer(found, dtype=np.uint64)
    in_use = entries[(entries & _IN_USE) != 0]
    return len(entries) == size // PAGESIZE and bool(((in_use & _OF_FILE) != 0).all())


class _ProgramHeader(ctypes.Structure):
    _fields_: ClassVar = [
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_size", ctypes.c_uint64),
        ("memory_size", ctypes.c_uint64),
        ("alignment", ctypes.c_uint64),
    ]


class _LoadedLibrary(ctypes.Structure):
    """The first fields of what ``dl_iterate_phdr`` tells of a library."""

    _fields_: ClassVar = [
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.POINTER(_ProgramHeader)),
        ("count", ctypes.c_uint16),
    ]


@cache
def _segments() -> tuple[tuple[int, int], ...]:
    """Address and size of the parts of the library that are never written to; none where they cannot be known."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return ()
    found: list[tuple[int, int]] = []

    def look(library: Any, _size: int, _data: object) -> int:
        name = os.path.basename(os.fsdecode(library.contents.name or b""))
        if name.startswith(_LIBRARIES):
            for header in library.contents.headers[: library.contents.count]:
                if header.kind == _LOADED and not header.flags & _WRITABLE:
                    begin = (library.contents.base + header.address) // PAGESIZE * PAGESIZE
                    end = -(-(library.contents.base + header.address + header.file_size) // PAGESIZE) * PAGESIZE
                    found.append((begin, end - begin))
        return 0

    signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_LoadedLibrary), ctypes.c_size_t, ctypes.c_void_p)
    _system().dl_iterate_phdr(signature(look), None)
    return tuple(found)


@cache
def _system() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return system
