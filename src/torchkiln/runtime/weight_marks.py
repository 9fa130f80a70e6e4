"""What tells at each call that weights are what they were: identity, memory, offset, version counter, a few elements.

The elements tell of writes that torch does not count: through ``.data``, as old optimizers do, or through memory shared
with NumPy. They are a sample, so a write to a part of a weight may go unseen. Sizes, strides and dtype are guarded by
Dynamo, and where a tensor begins in its storage is not: ``weight.data = stacked[1]`` moves only that.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.native.tensor_fields import TensorFields, tensor_fields
from torchkiln.native.tensor_layout import check_layout
from torchkiln.runtime.builtin_functions import METH_O, builtin_function
from torchkiln.runtime.plain_tensors import is_plain
from torchkiln.runtime.support import existing

# Eight bytes each, spread over a weight.
_SAMPLES = 4

Holds = Callable[[Sequence[Any]], bool]


class WeightMarks:
    """The marks of ``tensors``, each the input at one of ``positions``. Keeps the tensors and their memory alive.

    ``hold(inputs)`` says whether the list has these tensors, as they were when they were marked. That is never known of
    tensors made in inference mode, which have no version, and of what is no plain tensor in memory.
    """

    def __init__(self, tensors: Sequence[Any], positions: Sequence[int]) -> None:
        comparable = all(map(_is_comparable, tensors))
        self._tensors = tuple(tensors) if comparable else ()
        self._storages = tuple(tensor.untyped_storage() for tensor in self._tensors)
        self.hold = _comparison(self._tensors, tuple(positions)) if comparable else _never


def _never(_: Sequence[Any]) -> bool:
    return False


def _is_comparable(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not is_plain(value) or value.is_inference():
        return False
    return value.numel() == 0 or value.untyped_storage().nbytes() >= _end(value)


def _end(tensor: torch.Tensor) -> int:
    """The byte of its storage after the last element."""
    return (int(tensor.storage_offset()) + _reach(tensor) + 1) * tensor.element_size()


def _reach(tensor: torch.Tensor) -> int:
    """The distance from the first element to the last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _comparison(tensors: tuple[torch.Tensor, ...], positions: tuple[int, ...]) -> Holds:
    fields = tensor_fields()
    if fields is None or not check_layout().usable:
        return _python_comparison(tensors, positions)
    table = _table(tensors, positions, fields)
    return builtin_function("weights_hold", existing("kiln_weights_hold"), METH_O, table)


def _python_comparison(tensors: tuple[torch.Tensor, ...], positions: tuple[int, ...]) -> Holds:
    marks, last = _marks(tensors), max(positions)

    def holds(inputs: Sequence[Any]) -> bool:
        same = last < len(inputs) and all(inputs[k] is t for k, t in zip(positions, tensors, strict=True))
        return same and _marks(tensors) == marks

    return holds


def _marks(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
    return [
        (tensor._version, tensor.data_ptr(), *(_word(sample.address) & sample.mask for sample in _sampled(tensor)))
        for tensor in tensors
    ]


def _table(tensors: Sequence[torch.Tensor], positions: Sequence[int], fields: TensorFields) -> bytes:
    """What ``kiln_weights_hold`` reads: a header, then for each tensor its position, the addresses of the Python
    object, storage, memory and counter, the offset, the version, and the samples as addresses, masks and values."""
    words = [len(tensors), fields.storage, fields.counter, fields.memory, fields.version, fields.offset]
    for tensor, position in zip(tensors, positions, strict=True):
        storage, counter = _word(tensor._cdata + fields.storage), _word(tensor._cdata + fields.counter)
        offset, sampled = _word(tensor._cdata + fields.offset), _sampled(tensor)
        words += [position, id(tensor), storage, _word(storage + fields.memory), counter, offset, tensor._version]
        words.append(len(sampled))
        for sample in sampled:
            words += [sample.address, sample.mask, _word(sample.address) & sample.mask]
    return struct.pack(f"<{len(words)}Q", *words)


@dataclass(frozen=True)
class _Sample:
    """Eight bytes at an aligned ``address``, of which ``mask`` has those of the tensor: others are not its own."""

    address: int
    mask: int


def _sampled(tensor: torch.Tensor) -> list[_Sample]:
    """Words that elements of ``tensor`` lie in, the first and the last ones among them."""
    if tensor.numel() == 0:
        return []
    start = tensor.data_ptr()
    end = start + (_reach(tensor) + 1) * tensor.element_size()
    first, last = start // 8, (end - 1) // 8
    words = sorted({first + (last - first) * k // (_SAMPLES - 1) for k in range(_SAMPLES)})
    return [_Sample(word * 8, _mask(start - word * 8, end - word * 8)) for word in words]


def _mask(start: int, end: int) -> int:
    """The bits of a word from byte ``start`` to byte ``end``, either of which may be outside of it."""
    low, high = max(start, 0), min(end, 8)
    return (1 << 8 * high) - (1 << 8 * low)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
