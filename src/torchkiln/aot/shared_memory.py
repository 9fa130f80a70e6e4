"""Whether an argument that a package writes to shares memory with another: its code was made for memory apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchkiln.errors import ArgumentError
from torchkiln.runtime.plain_tensors import is_plain

Named = tuple[str, torch.Tensor]


def reject_shared_memory(written: Sequence[Named], others: Sequence[Named]) -> None:
    """Raise :class:`ArgumentError` where a tensor of ``written``, each without gaps, shares memory with another of
    ``others``.

    Such calls cannot be served: code may read the other before or after it writes.
    """
    for named in written:
        for other in others:
            if other is not named and shares_memory(named[1], other[1]):
                raise ArgumentError(
                    f"The {named[0]} is written to and shares memory with the {other[0]}; give it memory of its own."
                )


def shares_memory(dense: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of ``dense``, a tensor without gaps, lies where one of ``other`` does.

    False for tensors that native code refuses: they have no memory to compare.
    """
    if not (is_plain(dense) and is_plain(other)) or dense.numel() == 0 or other.numel() == 0:
        return False
    begin, end = _place(dense)
    other_begin, other_end = _place(other)
    if end <= other_begin or other_end <= begin:
        return False
    if other_end - other_begin == other.nbytes:
        return True
    # The other one has gaps, in which all of the first may lie.
    first, last = min(begin, other_begin), max(end, other_end)
    memory = torch.zeros(last - first, dtype=torch.uint8, device="cpu")
    memory[begin - first : end - first] = 1
    strides = [stride * other.element_size() for stride in other.stride()]
    read = memory.as_strided((*other.shape, other.element_size()), (*strides, 1), other_begin - first)
    return bool(read.any())


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the memory of a tensor with elements begins and ends."""
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
