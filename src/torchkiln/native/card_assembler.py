"""PTX to machine code of a card in process, by nvJitLink, which torch's builds for CUDA bring along.

Without it the card's driver does the same when a graph is loaded, in each process again.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib import metadata
from typing import Any

_log = logging.getLogger(__name__)
_PTX = 2  # nvJitLinkInputType
_PACKAGES = "nvidia-nvjitlink-cu12", "nvidia-nvjitlink-cu13", "nvidia-nvjitlink"
_NAMES = "libnvJitLink.so.12", "libnvJitLink.so.13"


def assemble(ptx: str, processor: str) -> bytes:
    """Machine code of a module for ``processor`` (``sm_90``); empty where nothing here assembles it."""
    library = _library()
    if library is None:
        return b""
    handle = ctypes.c_void_p()
    options = (ctypes.c_char_p * 1)(f"-arch={processor}".encode())
    if library.nvJitLinkCreate(ctypes.byref(handle), 1, options):
        return b""
    try:
        data = ptx.encode() + b"\0"
        given = handle, _PTX, data, ctypes.c_size_t(len(data)), b"kernels.ptx"
        if library.nvJitLinkAddData(*given) or library.nvJitLinkComplete(handle):
            # The driver may be newer, and says what is wrong where it is not.
            _log.info("nvJitLink refuses kernels, the driver is left to assemble them: %s", _complaint(library, handle))
            return b""
        size = ctypes.c_size_t()
        library.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvJitLinkGetLinkedCubin(handle, code)
        return code.raw
    finally:
        library.nvJitLinkDestroy(ctypes.byref(handle))


def _complaint(library: Any, handle: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvJitLinkGetErrorLogSize(handle, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    library.nvJitLinkGetErrorLog(handle, text)
    return text.value.decode(errors="replace").strip()


@cache
def _library() -> Any:
    """The library: that of an installed package, else one that the system finds; None without either."""
    for path in (*_in_packages(), *_NAMES):
        try:
            found = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(found, "nvJitLinkCreate"):
            return found
    return None


def _in_packages() -> list[str]:
    found = []
    for package in _PACKAGES:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name.startswith("libnvJitLink.so")]
    return found
