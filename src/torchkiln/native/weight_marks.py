"""What tells at each call that weights are what they were: identity, memory, version counter and a few elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class WeightMarks:
    """The marks of tensors, each of which is an input at one of ``positions``. Keeps the tensors and their memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
        self._tensors, self._positions = tuple(tensors), tuple(positions)
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._counted = not any(tensor.is_inference() for tensor in tensors)
        self._marks = self._read() if self._counted else ()

    def _read(self) -> tuple[tuple[int, int], ...]:
        return tuple((tensor._version, tensor.data_ptr()) for tensor in self._tensors)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Whether ``inputs`` still has the tensors, as they were. Tensors of inference mode are never known to be."""
        if not self._counted:
            return False
        same = all(inputs[p] is t for p, t in zip(self._positions, self._tensors, strict=True))
        return same and self._read() == self._marks


def mark_weights(tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> WeightMarks:
    return WeightMarks(tensors, positions)
