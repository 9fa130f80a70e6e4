"""Rows that are sorted by native code: ``torch.ops.kiln.sort``, an extern call that is no operator of torch.

It serves what :mod:`torchkiln.lowering.sorting` hands to it: floating-point numbers of up to 32 bits, row-major, along
the last dimension. Results are those of ``torch.sort(stable=True)``, and memory it works in.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from torchkiln.ir.program import ExternCall


def _sort(x: Tensor, descending: bool) -> tuple[Tensor, Tensor, Tensor]:
    values, positions = torch.sort(x, dim=-1, descending=descending, stable=True)
    return values, positions, torch.empty_like(positions)


def _shapes(x: Tensor, descending: bool) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), positions, torch.empty_like(positions)


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    library.define("sort(Tensor x, bool descending) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("sort", _sort, "CPU")
    torch.library.register_fake("kiln::sort", _shapes, lib=library)
    return library


_library()
SORT: torch._ops.OpOverload = torch.ops.kiln.sort.default
"""Values in order, where each was, and as much memory as positions take, with nothing of use in it."""


def is_sort(call: ExternCall) -> bool:
    """Whether ``call`` sorts rows in native code."""
    return call.target is SORT
