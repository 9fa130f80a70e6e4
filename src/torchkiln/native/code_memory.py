"""Memory for machine code: pages that are filled, then made executable."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any


@cache
def _system() -> Any:
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    system.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    system.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return system


def allocate(size: int) -> int:
    """The address of ``size`` writable bytes, at the start of a page."""
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address: int = _system().mmap(None, size, access, flags, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _failed(f"there is no memory for {size} bytes of code")
    return address


def protect(address: int, size: int, protection: int) -> None:
    if size and _system().mprotect(address, size, protection):
        raise _failed("the system does not let this process make code executable")


def release(address: int, size: int) -> None:
    _system().munmap(address, size)


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what} ({os.strerror(number)})")
