"""PTX to machine code without a card, by nvJitLink: what the driver would say of a kernel, and what it costs."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

_PTX = 2  # nvJitLinkInputType


@dataclass(frozen=True)
class Assembled:
    """Of one kernel: registers of a thread, bytes that did not fit them, and shared memory of a block."""

    registers: int
    spilled: int
    shared: int


@cache
def assembler() -> Any:
    """The library, None where the package is not installed."""
    try:
        files = metadata.files("nvidia-nvjitlink-cu12") or []
    except metadata.PackageNotFoundError:
        return None
    path = next((file.locate() for file in files if file.name.startswith("libnvJitLink.so")), None)
    return None if path is None else ctypes.CDLL(str(path))


def assemble(ptx: str, processor: str) -> dict[str, Assembled]:
    """The kernels of a module, by name; refused PTX raises with the assembler's words."""
    library, handle = assembler(), ctypes.c_void_p()
    options = (ctypes.c_char_p * 2)(f"-arch={processor}".encode(), b"-verbose")
    assert library.nvJitLinkCreate(ctypes.byref(handle), 2, options) == 0
    try:
        data = ptx.encode() + b"\0"
        added = library.nvJitLinkAddData(handle, _PTX, data, ctypes.c_size_t(len(data)), b"kernels.ptx")
        if added or library.nvJitLinkComplete(handle):
            raise ValueError(_log(library, handle, "Error"))
        return _kernels(_log(library, handle, "Info"))
    finally:
        library.nvJitLinkDestroy(ctypes.byref(handle))


def _log(library: Any, handle: ctypes.c_void_p, kind: str) -> str:
    size = ctypes.c_size_t()
    getattr(library, f"nvJitLinkGet{kind}LogSize")(handle, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    getattr(library, f"nvJitLinkGet{kind}Log")(handle, text)
    return text.value.decode()


def _kernels(log: str) -> dict[str, Assembled]:
    found = {}
    for part in log.split("Compiling entry function")[1:]:
        numbers = {
            what: int(number[1]) if (number := re.search(pattern, part)) else 0
            for what, pattern in (
                ("registers", r"Used (\d+) registers"),
                ("spilled", r"(\d+) bytes spill stores"),
                ("shared", r"(\d+) bytes smem"),
            )
        }
        found[part.split("'")[1]] = Assembled(**numbers)
    return found
