"""The kernels of a graph on its card: loaded by CUDA's driver, with the functions that launch them.

Nothing of CUDA is linked: the driver is the library that the card's driver brings, found when the first graph with a
card is loaded. Tests put a driver of their own in its place, for an emulated card.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch

from torchkiln.artifact.artifact import (
    CARD_ARENA_BYTES,
    CARD_CAPTURED,
    CARD_FUNCTIONS,
    CARD_LENT_BYTES,
    CARD_LENT_STREAM,
    CARD_LENT_TENSOR,
    FIRST_CARD_KERNEL,
    CardInfo,
)
from torchkiln.errors import ArtifactError
from torchkiln.native.symbols import address_of
from torchkiln.runtime.cuda_graphs.device import Captures, CudaCaptures
from torchkiln.runtime.plain_tensors import is_plain, plain_copy
from torchkiln.runtime.tensor_handles import delete_handles, handles_of


class Driver(Protocol):
    """What loads and launches kernels."""

    def function(self, name: str) -> int:
        """The address of one of ``CARD_FUNCTIONS``."""

    def context(self, number: int) -> int:
        """The context that torch uses of a card."""

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], Callable[[], object]]:
        """The kernels of a module, and what unloads them."""

    def captures(self, number: int) -> Captures:
        """What captures launches on a card."""


ACCESS_BYTES = 16  # that a kernel moves at the most, and what it takes memory to be aligned to
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

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
    """The array that native code finds under ``CARD_SYMBOL``; it keeps the module of kernels loaded.

    A CUDA graph that has captured the kernels may be replayed when nobody has the compiled graph any more. They stay
    loaded for it then, and its constants stay where they are, as long as the process lives.
    """

    def __init__(
        self, card: CardInfo, code: bytes, machine_code: bytes, constants: Iterable[torch.Tensor] = ()
    ) -> None:
        driver = _driver_of(card)
        self.constants = [on_card(card, c) if k in card.constants else c for k, c in enumerate(constants)]
        functions, context = [*map(driver.function, CARD_FUNCTIONS)], driver.context(card.number)
        kernels, unload = _loaded(driver, card, code, machine_code) if card.kernels else ([], _nothing)
        entries = [*functions, context, *[None] * (FIRST_CARD_KERNEL - CARD_CAPTURED), *kernels]
        self.array = (ctypes.c_void_p * len(entries))(*entries)
        self.captures = driver.captures(card.number)
        # Not at exit: the context is gone by then.
        weakref.finalize(self, _dropped, self.array, self.constants, unload).atexit = False


    @property
    def arena_bytes(self) -> int:
        """What the arena of the last call took."""
        return int(self.array[CARD_ARENA_BYTES] or 0)

    @contextmanager
    def lending(self, stream: int, memory: torch.Tensor) -> Iterator[None]:
        """Calls on ``stream`` have their arena in ``memory``; that they are captured leaves no mark.

        No other thread may call on that stream meanwhile.
        """
        mark, (handle,) = self.array[CARD_CAPTURED], handles_of([memory])
        self.array[CARD_LENT_STREAM], self.array[CARD_LENT_BYTES] = stream, memory.nbytes
        self.array[CARD_LENT_TENSOR] = handle
        try:
            yield
        finally:
            for place in (CARD_LENT_TENSOR, CARD_LENT_BYTES, CARD_LENT_STREAM):
                self.array[place] = None
            self.array[CARD_CAPTURED] = mark
            delete_handles([handle])


_captured: list[list[torch.Tensor]] = []  # constants of graphs that were dropped, which a CUDA graph may read


def _dropped(array: ctypes.Array[ctypes.c_void_p], constants: list[torch.Tensor], unload: Callable[[], object]) -> None:
    if array[CARD_CAPTURED]:
        _captured.append(constants)
    else:
        unload()


def _nothing() -> None:
    return None


def _loaded(driver: Driver, card: CardInfo, code: bytes, machine_code: bytes) -> tuple[list[int], Callable[[], object]]:
    """Machine code where there is some and the driver takes it: one that is older than the assembler may not."""
    if machine_code:
        try:
            return driver.load(machine_code, card.kernels, card.number)
        except ArtifactError as error:
            _log.info("%s Its PTX is assembled instead.", error)
    return driver.load(code, card.kernels, card.number)


def on_card(card: CardInfo, constant: torch.Tensor) -> torch.Tensor:
    """A constant in memory of the card, that begins where its kernels can read it."""
    there = constant if card.number < 0 else constant.to(torch.device("cuda", card.number))
    if not is_plain(there) or there.data_ptr() % 16 == 0:
        return there
    copy = plain_copy(there)
    return there if copy is None else copy


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
        if torch.cuda.is_available():
            torch.cuda.init()  # loads the driver, from wherever torch finds it
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ArtifactError("This graph was compiled for an NVIDIA card, and here is no driver for one.") from error
        self._process, self._contexts = os.getpid(), dict[int, int]()
        self._captures: dict[int, CudaCaptures] = {}

    def function(self, name: str) -> int:
        address = address_of(name) if name.startswith("aoti_") else _address(self._library, name)
        if address is None:
            raise ArtifactError(f"Neither torch nor the driver has {name}; use a newer one, or the backend on the CPU.")
        return address

    def context(self, number: int) -> int:
        if number not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), number)
            # Retained once for each card: torch keeps it for the life of the process.
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[number] = int(context.value or 0)
        return self._contexts[number]

    def captures(self, number: int) -> Captures:
        return self._captures.setdefault(number, CudaCaptures(number))

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], Callable[[], object]]:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
        # CU_JIT_ERROR_LOG_BUFFER and the size of it
        options, values = (ctypes.c_int * 2)(5, 6), (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        with self._current(number):
            try:
                self._call("cuModuleLoadDataEx", ctypes.byref(module), code + b"\0", 2, options, values)
            except ArtifactError as error:
                reason = log.value.decode(errors="replace").strip()
                raise ArtifactError(f"The card's driver refuses the kernels of a graph: {error} {reason}") from error
            return [self._kernel(module, symbol) for symbol in symbols], partial(self._unload, module, number)

    def _kernel(self, module: ctypes.c_void_p, symbol: str) -> int:
        found = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(found), module, symbol.encode())
        return int(found.value or 0)

    def _unload(self, module: ctypes.c_void_p, number: int) -> None:
        """In whatever thread the last user of the module goes. A forked child has nothing of the card."""
        if os.getpid() != self._process:
            return
        try:
            with self._current(number):
                self._call("cuModuleUnload", module)
        except ArtifactError as error:
            _log.info("Kernels stay loaded: %s", error)

    @contextmanager
    def _current(self, number: int) -> Iterator[None]:
        """The context of a card in this thread, which may meanwhile do what the capture of a CUDA graph forbids."""
        mode, left = ctypes.c_int(_RELAXED), ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(self.context(number)))
        try:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(left))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise ArtifactError(f"{name} failed: {(text.value or b'no reason given').decode()} ({status}).")


def _address(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
