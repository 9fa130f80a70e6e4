"""Plain tensors: strided ones of the CPU or a card whose memory holds their values. Telling others, and copying them.

Native code reads memory. Tensors that have none (fake, meta, zeros that torch keeps as a mark, wrappers) or that differ
from it (negated, conjugated, sparse) come from callers, gradients, saved-tensor hooks and operators. Their dispatch
keys mark them, so one load and one comparison tell a plain tensor from all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchkiln.errors import NotPlainError
from torchkiln.native.tensor_classes import is_no_subclass
from torchkiln.native.tensor_keys import keys_of, plain_keys


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory of the CPU, or of a card, holds what the tensor shows."""
    known = plain_keys()
    on_card = known.devices if tensor.is_cuda else 0
    return keys_of(tensor) & known.relevant & ~on_card == known.expected & ~on_card


def make_plain(
    inputs: list[Any],
    tensors: Sequence[int],
    written: Sequence[int],
    numbers: Sequence[int],
    compilation: int | None = None,
) -> None:
    """Put plain copies in the places of the other ``tensors`` among ``inputs``.

    Raises :class:`NotPlainError` where there is no such copy, where it would be ``written`` in place of the original,
    for ``numbers`` that have no value yet, and while a mode is on in which torch's operators answer fake tensors.
    ``inputs`` are then as they were. The graph is one of ``compilation``.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise NotPlainError("a compiled graph is called in a mode of fake tensors", compilation)
    copies: dict[int, torch.Tensor] = {}
    for position in tensors:
        given = inputs[position]
        if not isinstance(given, torch.Tensor) or is_plain(given):
            continue
        copy = None if position in written else plain_copy(given)
        if copy is None:
            raise NotPlainError(f"input {position} of a compiled graph is {describe(given)}", compilation)
        copies[position] = copy
    for position in numbers:
        if not isinstance(inputs[position], int):
            kind = type(inputs[position]).__name__
            raise NotPlainError(f"input {position} of a compiled graph is a {kind}", compilation)
    for position, copy in copies.items():
        inputs[position] = copy


def plain_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """A plain tensor of the same values, sizes and strides; None for what only operators of torch can read."""
    known = plain_keys()
    ignored = known.marks | (known.devices if tensor.is_cuda else 0)
    if keys_of(tensor) & known.relevant & ~ignored != known.expected & ~ignored:
        return None
    with torch.no_grad():
        copy = _with_same_strides(tensor)
    return copy if is_plain(copy) else None  # a mode may be on in which copies are not plain either


def _with_same_strides(tensor: torch.Tensor) -> torch.Tensor:
    shape, strides = tensor.shape, tensor.stride()
    for dim, stride in enumerate(strides):
        if stride == 0 and shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)  # expanded: one element is copied for all
    memory = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return memory.copy_(tensor).expand(shape)


def describe(tensor: torch.Tensor) -> str:
    """What kind of tensor this is, in words for an error."""
    if not is_no_subclass(tensor):
        return f"a {type(tensor).__name__}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside a transform of torch.func"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on the device {tensor.device}"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor"
    return "a tensor that is not what its memory holds, to be written"
