"""Sorting: rows of numbers that a radix sort takes go to native code, all else to torch's operator.

Native code is stable whether it is asked to or not. Where it is not, eager leaves the order of equal elements open, and
has another one. Few numbers of float32 are equal; many halves are, so those are left to torch unless it is stable.

Nanoseconds for an element of both, float32 on one thread: rows of 8 12 and 12, of 32 19 and 27, of 200 18 and 49, of
1000 13 and 55, of 32000 14 and 60; of a million in one row 23 and 77.
"""

from __future__ import annotations

import torch

from torchkiln.graph.native_operators import SORT
from torchkiln.ir import index as ix
from torchkiln.lowering.builder import Builder, TensorValue
from torchkiln.lowering.registry import NotLowered, lowers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**32 - 1  # an index is kept in 32 bits beside its key


@lowers("sort")
def lower_sort(
    builder: Builder, x: TensorValue, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[TensorValue, ...]:
    if x.dtype not in (DTYPES if stable else DTYPES[:1]) or not x.shape or dim not in (-1, len(x.shape) - 1):
        raise NotLowered("a sort of numbers that are no keys of 32 bits, or not along the last dimension")
    if builder.device != "cpu":
        raise NotLowered("a sort on another device than the CPU")
    row = x.shape[-1]
    if not isinstance(row, int) or row > _MOST:
        raise NotLowered("a sort of rows that may be too long for indices of 32 bits")
    results = builder.results
    view = builder.materialize(x)
    strides = ix.contiguous_strides(x.shape)
    if view.strides != strides or builder.sizes.strides(results[0].stride()) != strides:
        raise NotLowered("a sort of rows that are not one after the other in memory")
    values, order, _ = builder.extern(SORT, (view, descending), [*results, results[1]])
    return values, order
