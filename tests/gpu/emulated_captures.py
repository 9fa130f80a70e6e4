"""CUDA graphs of an emulated card: what was captured runs again on the same memory, found by its address.

As on a card, a capture computes nothing, and a replay reads and writes the captured addresses whatever lies there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from torchkiln.runtime.cuda_graphs.device import Run, StreamMemory

CAPTURE_STREAM = 0x9ABC


class _Stream(Protocol):
    stream: int
    capturing: bool


class EmulatedCaptures:
    """``captured`` and ``replayed`` count. Captures raise where ``failing``; those ``elsewhere`` are on no card."""

    place = torch.device("cpu")

    def __init__(self, driver: _Stream) -> None:
        self._driver = driver
        self._memories: dict[int, StreamMemory] = {}
        self.captured = self.replayed = 0
        self.failing = False
        self.elsewhere: list[torch.Tensor] = []

    def memory(self) -> StreamMemory:
        return self._memories.setdefault(self._driver.stream, StreamMemory())

    def is_capturing(self) -> bool:
        return self._driver.capturing

    def holds(self, tensor: torch.Tensor) -> bool:
        return not any(tensor is other for other in self.elsewhere)

    def capture(self, run: Run, inputs: list[Any]) -> tuple[Callable[[], object], list[Any]]:
        assert not self._driver.capturing
        if self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        here = [_at_its_address(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        addresses = {t.untyped_storage().data_ptr() for t in here if isinstance(t, torch.Tensor)}
        kept = [(t, t.clone()) for t in map(_bytes_of, filter(_is_tensor, here))]
        random_state = torch.get_rng_state()
        with self._capturing():
            results = run(CAPTURE_STREAM, [*here])
        torch.set_rng_state(random_state)
        for memory, before in kept:
            memory.copy_(before)

        def own(found: list[Any]) -> list[tuple[int, torch.Tensor]]:
            tensors = ((k, t) for k, t in enumerate(found) if _is_tensor(t) and t.numel())
            return [(k, _bytes_of(t)) for k, t in tensors if t.untyped_storage().data_ptr() not in addresses]

        targets = own(results)
        for _, memory in targets:
            memory.fill_(0xFF)  # not a number
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with self._capturing(capturing=False):
                again = run(CAPTURE_STREAM, [*here])
            for (_, memory), (_, computed) in zip(targets, own(again), strict=True):
                memory.copy_(computed)

        return replay, results

    @contextmanager
    def _capturing(self, *, capturing: bool = True) -> Iterator[None]:
        driver = self._driver
        before = driver.stream
        driver.stream, driver.capturing = CAPTURE_STREAM, capturing
        try:
            yield
        finally:
            driver.stream, driver.capturing = before, False


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _memory_at(address: int, nbytes: int) -> torch.Tensor:
    """The bytes at an address, which nothing keeps there."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return _memory_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else torch.empty(0, dtype=torch.uint8)


def _at_its_address(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements at the same place, without a hold on the memory."""
    if tensor.untyped_storage().nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    whole = torch.empty(0, dtype=tensor.dtype).set_(_bytes_of(tensor).untyped_storage())  # type: ignore[call-overload]
    return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())
