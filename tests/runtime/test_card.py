"""Loading the kernels of a card: machine code first, PTX where the driver refuses that, and reasons in words."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from tests.gpu.emulated_card import EmulatedDriver
from torchkiln.artifact.artifact import CARD_CONTEXT, FIRST_CARD_KERNEL, CardInfo
from torchkiln.errors import ArtifactError
from torchkiln.runtime import card
from torchkiln.runtime.card import CardArray, emulator


class Driver(EmulatedDriver):
    """A driver that refuses machine code where it is told to."""

    refused: bytes = b""

    def load(self, code: bytes, symbols: Sequence[str], number: int) -> tuple[list[int], object]:
        if code == self.refused:
            raise ArtifactError("The card's driver refuses the kernels of a graph: no binary for this device.")
        return [len(code)] * len(symbols), code


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
