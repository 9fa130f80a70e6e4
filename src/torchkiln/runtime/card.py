"""The kernels of a graph on its card: loaded by CUDA's driver, with the functions that launch them.

Nothing of CUDA is linked: the driver is the library that the card's driver brings, found when the first graph with a
card is loaded. Tests put a driver of their own in its place, for an emulated card.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from torchkiln.artifact.artifact import CARD_FUNCTIONS, CardInfo
from torchkiln.errors import ArtifactError
from torchkiln.native.symbols import address_of


class Driver(Protocol):
    """What loads and launches kernels."""

    def function(self, name: str) -> int:
        """The address of one of ``CARD_FUNCTIONS``."""

    def context(self, number: int) -> int:
        """The context that torch uses of a card."""

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], object]:
        """The kernels of a module, and what keeps them loaded."""


_log = logging.getLogger(__name__)
_lock = threading.Lock()
_emulator: Driver | None = None


@contextmanager
def emulator(driver: Driver) -> Iterator[None]:
    """Graphs of an emulated card that are loaded meanwhile are launched by ``driver``."""
    global _emulator
    with _lock:
        before, _emulator = _emulator, driver
    try:
        yield
    finally:
        with _lock:
            _emulator = before


class CardArray:
    """The array that native code finds under ``CARD_SYMBOL``; it keeps the module of kernels loaded."""

    def __init__(self, card: CardInfo, code: bytes, machine_code: bytes) -> None:
        driver = _driver_of(card)
        kernels, self._module = _loaded(driver, card, code, machine_code) if card.kernels else ([], None)
        entries = [*map(driver.function, CARD_FUNCTIONS), driver.context(card.number), *kernels]
        self.array = (ctypes.c_void_p * len(entries))(*entries)


def _loaded(driver: Driver, card: CardInfo, code: bytes, machine_code: bytes) -> tuple[list[int], object]:
    """Machine code where there is some and the driver takes it: one that is older than the assembler may not."""
    if machine_code:
        try:
            return driver.load(machine_code, card.kernels, card.number)
        except ArtifactError as error:
            _log.info("%s Its PTX is assembled instead.", error)
    return driver.load(code, card.kernels, card.number)


def on_card(card: CardInfo, constant: torch.Tensor) -> torch.Tensor:
    """A constant in memory of the card."""
    return constant if card.number < 0 else constant.to(torch.device("cuda", card.number))


def _driver_of(card: CardInfo) -> Driver:
    if card.number >= 0:
        return cuda_driver()
    if _emulator is None:
        raise ArtifactError("This graph was compiled for an emulated card, and nothing emulates one; compile it again.")
    return _emulator


@cache
def cuda_driver() -> CudaDriver:
    """The driver of this process's cards; :class:`ArtifactError` without one."""
    return CudaDriver()


class CudaDriver:
    """CUDA's driver, and torch's library for it."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ArtifactError("This graph was compiled for an NVIDIA card, and here is no driver for one.") from error
        torch.cuda.init()

    def function(self, name: str) -> int:
        address = address_of(name) if name.startswith("aoti_") else _address(self._library, name)
        if address is None:
            raise ArtifactError(f"Neither torch nor the driver has {name}; use a newer one, or the backend on the CPU.")
        return address

    def context(self, number: int) -> int:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        # Retained once for each card: torch keeps it for the life of the process.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return int(context.value or 0)

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], object]:
        with torch.cuda.device(number):
            torch.cuda.current_stream().query()  # makes the context current in this thread
            module = _Module(self, code)
            return [module.function(symbol) for symbol in symbols], module

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise ArtifactError(f"{name} failed: {(text.value or b'no reason given').decode()} ({status}).")


class _Module:
    """A module in the driver, unloaded when nothing uses it any more."""

    def __init__(self, driver: CudaDriver, code: bytes) -> None:
        self._driver, self._handle = driver, ctypes.c_void_p()
        log = ctypes.create_string_buffer(4096)
        # CU_JIT_ERROR_LOG_BUFFER and the size of it
        options = (ctypes.c_int * 2)(5, 6)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        try:
            driver._call("cuModuleLoadDataEx", ctypes.byref(self._handle), code + b"\0", 2, options, values)
        except ArtifactError as error:
            reason = log.value.decode(errors="replace").strip()
            raise ArtifactError(f"The card's driver refuses the kernels of a graph: {error} {reason}") from error
        # Not at exit: the context is gone by then.
        weakref.finalize(self, driver._library.cuModuleUnload, self._handle).atexit = False

    def function(self, symbol: str) -> int:
        found = ctypes.c_void_p()
        self._driver._call("cuModuleGetFunction", ctypes.byref(found), self._handle, symbol.encode())
        return int(found.value or 0)


def _address(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
