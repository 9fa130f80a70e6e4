"""Loading the kernels of a card: machine code first, PTX where the driver refuses that, and reasons in words."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.gpu.emulated_card import EmulatedDriver
from torchkiln.artifact.artifact import CARD_CAPTURED, CARD_CONTEXT, FIRST_CARD_KERNEL, CardInfo
from torchkiln.errors import ArtifactError
from torchkiln.runtime import card
from torchkiln.runtime.card import CardArray, emulator


class Driver(EmulatedDriver):
    """A driver that refuses machine code where it is told to."""

    refused: bytes = b""

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], Callable[[], object]]:
        if code == self.refused:
            raise ArtifactError("The card's driver refuses the kernels of a graph: no binary for this device.")
        return [len(code)] * len(symbols), lambda: self.unloaded.append(tuple(symbols))


@pytest.mark.parametrize(("refused", "length"), [(b"", 6), (b"object", 3)])
def test_machine_code_is_loaded_and_ptx_where_it_is_refused(refused: bytes, length: int) -> None:
    driver = Driver()
    driver.refused = refused
    with emulator(driver):
        array = CardArray(CardInfo(-1, ("kernel0", "kernel1")), b"ptx", b"object").array
    assert array[FIRST_CARD_KERNEL:] == [length, length]
    assert array[CARD_CONTEXT] == driver.context(-1)
    assert ctypes.sizeof(array) == 8 * (FIRST_CARD_KERNEL + 2)


def test_an_emulated_card_that_nothing_emulates_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="nothing emulates one; compile it again"):
        CardArray(CardInfo(-1, ()), b"", b"")


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(card.ctypes, "CDLL", missing)
    with pytest.raises(ArtifactError, match="compiled for an NVIDIA card, and here is no driver for one"):
        card.CudaDriver()


@pytest.mark.parametrize("captured", [False, True])
def test_kernels_are_unloaded_with_their_graph_unless_a_cuda_graph_has_them(captured: bool) -> None:
    driver, constant = Driver(), torch.ones(3)
    with emulator(driver):
        array = CardArray(CardInfo(-1, ("kernel0",)), b"ptx", b"", [constant])
    if captured:
        array.array[CARD_CAPTURED] = 1
    kept = len(card._captured)
    assert array.constants[0] is constant
    del array
    assert driver.unloaded == ([] if captured else [("kernel0",)])
    assert card._captured[kept:] == ([[constant]] if captured else [])
    del card._captured[kept:]


def test_constants_begin_where_kernels_can_read_them() -> None:
    memory = torch.arange(40.0)
    given = [memory[1:7].view(2, 3), memory[3:].as_strided((4, 3), (0, 2)), memory[8:16], memory[1:1], memory[1:3]]
    with emulator(Driver()):
        found = CardArray(CardInfo(-1, (), (0, 1, 2, 3)), b"", b"", given).constants
    for mine, theirs in zip(found, given, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert mine.stride() == theirs.stride()
    assert all(constant.data_ptr() % 16 == 0 for constant in found[:3])
    assert found[2] is given[2]
    assert found[4] is given[4]  # one of the CPU


class CudaLibrary:
    """CUDA's driver as far as loading goes: notes the calls, and what a thread's context and capture mode are."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.contexts: list[int] = []
        self.mode = 0
        self.refusal = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return int(getattr(self, f"_{name}", lambda *_: 0)(*arguments) or 0)

        return call

    def _cuDevicePrimaryCtxRetain(self, place: Any, device: ctypes.c_int) -> None:
        place._obj.value = 0x700 + device.value

    def _cuDeviceGet(self, place: Any, number: int) -> None:
        place._obj.value = number

    def _cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        self.contexts.append(context.value or 0)

    def _cuCtxPopCurrent_v2(self, place: Any) -> None:
        place._obj.value = self.contexts.pop()

    def _cuThreadExchangeStreamCaptureMode(self, place: Any) -> None:
        self.mode, place._obj.value = place._obj.value, self.mode

    def _cuModuleLoadDataEx(self, place: Any, code: bytes, count: int, options: Any, values: Any) -> int:
        assert (self.contexts, self.mode) == ([0x701], 2)
        assert (code[-1], count, list(options)) == (0, 2, [5, 6])
        ctypes.memmove(values[0], b"unknown version\0", 16)
        place._obj.value = 0x10
        return self.refusal

    def _cuModuleGetFunction(self, place: Any, module: ctypes.c_void_p, symbol: bytes) -> None:
        place._obj.value = (module.value or 0) + int(symbol[-1:])

    def _cuModuleUnload(self, module: ctypes.c_void_p) -> None:
        assert (self.contexts, self.mode, module.value) == ([0x701], 2, 0x10)

    def _cuGetErrorString(self, status: int, place: Any) -> None:
        place._obj.value = b"no such format"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaLibrary]:
    library = CudaLibrary()
    monkeypatch.setattr(card.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    yield library
    assert (library.contexts, library.mode) == ([], 0)


def test_modules_come_and_go_in_the_context_of_their_card(cuda: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any thread, and while a CUDA graph is captured; a forked child leaves them alone."""
    driver = card.CudaDriver()
    kernels, unload = driver.load(b"code", ("kernel0", "kernel1"), 1)
    assert kernels == [0x10, 0x11]
    assert "cuModuleUnload" not in cuda.calls
    unload()
    assert cuda.calls.count("cuModuleUnload") == 1
    assert cuda.calls.count("cuDevicePrimaryCtxRetain") == 1
    calls, process = len(cuda.calls), os.getpid()
    monkeypatch.setattr(card.os, "getpid", lambda: process + 1)
    unload()
    assert len(cuda.calls) == calls


def test_what_the_driver_refuses_is_said_in_its_words(cuda: CudaLibrary) -> None:
    cuda.refusal = 200
    with pytest.raises(ArtifactError, match=r"cuModuleLoadDataEx failed: no such format \(200\). unknown version"):
        card.CudaDriver().load(b"code", ("kernel0",), 1)
