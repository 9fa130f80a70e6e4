"""A GPU as plain numbers: what decides about code for it, and about how it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Card:
    """A card of compute capability ``major``.``minor``.

    ``processors`` are its multiprocessors, ``shared_bytes`` what a block of threads may have of shared memory, and
    ``bandwidth`` what its memory moves in a second, in bytes by the data sheet; 0 where torch does not tell. ``tf32``
    is whether the user allows float32 matmuls of fewer digits, which tensor cores compute. An ``emulated`` one is this
    process itself, so that tests run without a card; where it ``takes_all``, tensors of the CPU count as its own.
    """

    major: int
    minor: int
    processors: int
    shared_bytes: int
    bandwidth: int
    emulated: bool = False
    tf32: bool = False
    takes_all: bool = False

    @property
    def has_tf32(self) -> bool:
        return self.major >= 8

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


_emulated: ContextVar[Card | None] = ContextVar("emulated card", default=None)


@contextmanager
def emulated_card(card: Card) -> Iterator[None]:
    """Compile for ``card`` in this context, whose kernels threads of the CPU run: for tests."""
    token = _emulated.set(card)
    try:
        yield
    finally:
        _emulated.reset(token)


def current_card() -> Card | None:
    """The card that torch uses in this thread now; None before the process uses any, and without one."""
    emulated = _emulated.get()
    if emulated is not None:
        return emulated
    if not torch.cuda.is_initialized() or torch.version.cuda is None:
        return None
    return _described(torch.cuda.get_device_properties(torch.cuda.current_device()))


def _described(found: Any) -> Card:
    """A card by torch's description; memory moves twice in each of its clock's cycles, which torch states in kHz."""
    numbers = {name: int(getattr(found, name, 0)) for name in ("memory_clock_rate", "memory_bus_width")}
    return Card(
        major=found.major,
        minor=found.minor,
        processors=found.multi_processor_count,
        shared_bytes=int(getattr(found, "shared_memory_per_block_optin", 48 << 10)),
        bandwidth=2 * numbers["memory_clock_rate"] * 1000 * numbers["memory_bus_width"] // 8,
        tf32=_float32_matmul() != "ieee",
    )


def _float32_matmul() -> str:
    """The precision that the user allows for float32 matmuls of cards: "ieee" is that of float32, "tf32" less.

    What ``torch.get_float32_matmul_precision`` asks raises once somebody has set that of one kind of device.
    """
    allowed = str(torch.backends.cuda.matmul.fp32_precision)
    return "ieee" if allowed == "none" else allowed
