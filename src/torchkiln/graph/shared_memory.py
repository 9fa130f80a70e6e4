"""Which tensors of a list show the same memory, and how they would be made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchkiln.graph.fake import size_hint
from torchkiln.native.tensor_classes import is_no_subclass

_ALIGNED = 16  # bytes: the largest element of any dtype


@dataclass(frozen=True)
class SharedMemory:
    """Memory that several tensors show parts of, as ``elements`` of one dtype; bytes where they have several.

    ``positions`` are those of the tensors, with the offset of each in elements of its own. ``first`` is one of them,
    and ``start`` where the memory begins in its storage, in elements.
    """

    dtype: torch.dtype
    elements: int
    positions: dict[int, int]
    first: int
    start: int

    def content(self, values: Sequence[Any]) -> torch.Tensor:
        """The memory as a tensor, of the tensors that :func:`shared_memory` was given."""
        storage = values[self.first].untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.start, (self.elements,), (1,))


@dataclass(frozen=True)
class _Span:
    """The bytes from ``start`` to ``end`` of a storage that the tensor at ``position`` reaches."""

    storage: int
    start: int
    end: int
    position: int


def shared_memory(values: Sequence[Any]) -> list[SharedMemory]:
    """The memories that more than one tensor among ``values`` shows; symbolic sizes are those of the example."""
    spans = [span for position, value in enumerate(values) if (span := _span(position, value)) is not None]
    spans.sort(key=lambda span: (span.storage, span.start, span.position))
    found = []
    for _, of_storage in groupby(spans, key=lambda span: span.storage):
        for together in _overlapping(list(of_storage)):
            if len(together) > 1:
                found.append(_memory(together, values))
    return sorted(found, key=lambda memory: memory.first)


def _span(position: int, value: Any) -> _Span | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
        return None
    if not (is_no_subclass(value) or isinstance(value, FakeTensor)) or value.is_conj() or value.is_neg():
        return None
    sizes, strides = [size_hint(n) for n in value.shape], [size_hint(n) for n in value.stride()]
    if 0 in sizes:
        return None
    start = size_hint(value.storage_offset())
    last = start + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    bytes_each = value.element_size()
    return _Span(value.untyped_storage()._cdata, start * bytes_each, (last + 1) * bytes_each, position)


def _overlapping(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Spans in order of their starts, in groups that no other span reaches into."""
    groups: list[list[_Span]] = []
    reached = -1
    for span in spans:
        if span.start < reached:
            groups[-1].append(span)
        else:
            groups.append([span])
        reached = max(reached, span.end)
    return groups


def _memory(spans: Sequence[_Span], values: Sequence[Any]) -> SharedMemory:
    dtypes = {values[span.position].dtype for span in spans}
    (dtype,) = dtypes if len(dtypes) == 1 else (torch.uint8,)
    start = spans[0].start if len(dtypes) == 1 else spans[0].start // _ALIGNED * _ALIGNED
    end = max(span.end for span in spans)
    offsets = {span.position: (span.start - start) // values[span.position].element_size() for span in spans}
    return SharedMemory(
        dtype, (end - start) // dtype.itemsize, dict(sorted(offsets.items())), min(offsets), start // dtype.itemsize
    )
