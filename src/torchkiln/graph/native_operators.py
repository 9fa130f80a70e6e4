"""Operators that native code does itself, by the address of memory: ``torch.ops.kiln.check``, ``sort`` and ``scan``.

They are registered with torch all the same, so that graphs with them can be run as they are, and for the message of a
check that failed. Loaded code may name them, so nothing of the compiler is imported here.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def _check(bad: Tensor, error: str, text: str, value: Tensor | None = None) -> None:
    if bool(bad.any()):
        raise getattr(builtins, error)(text if value is None else text.replace("{}", str(value.item())))


def _sort(x: Tensor, descending: bool) -> tuple[Tensor, Tensor, Tensor]:
    values, indices = torch.sort(x, dim=-1, descending=descending, stable=True)
    return values, indices, torch.empty_like(indices)


def _sort_shapes(x: Tensor, descending: bool) -> tuple[Tensor, Tensor, Tensor]:
    indices = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), indices, torch.empty_like(indices)


def _scan(x: Tensor, reducer: str, backward: bool) -> Tensor:
    walked = x.flip(1) if backward else x
    found = walked.cumsum(1) if reducer == "sum" else walked.cumprod(1)
    return found.flip(1) if backward else found


_OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "check": ("(Tensor bad, str error, str text, Tensor? value=None) -> ()", _check, lambda *_, **__: None),
    "sort": ("(Tensor x, bool descending) -> (Tensor, Tensor, Tensor)", _sort, _sort_shapes),
    "scan": ("(Tensor x, str reducer, bool backward) -> Tensor", _scan, lambda x, *_: torch.empty_like(x)),
}


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    for name, (schema, implementation, fake) in _OPERATORS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, implementation, "CPU")
        torch.library.register_fake(f"kiln::{name}", fake, lib=library)
    return library


_library()
CHECK: torch._ops.OpOverload = torch.ops.kiln.check.default
"""Raises ``error`` (IndexError or RuntimeError, as eager does) with ``text`` where the one flag ``bad`` is set.

A loop finds out whether some value is one that eager refuses. Kernels do not stop for it: those that index by data
replace an index out of range by 0, so that nothing wild is read. The number in ``value``, where it is given, is said in
place of ``{}``; native code leaves that to Python.
"""
SORT: torch._ops.OpOverload = torch.ops.kiln.sort.default
"""Rows sorted as by ``torch.sort(stable=True)``: values, the index of each, and memory that the sort works in.

Rows are floating-point numbers of up to 32 bits, row-major, along the last dimension.
"""
SCAN: torch._ops.OpOverload = torch.ops.kiln.scan.default
"""Running sums (``reducer`` is ``sum``) or products (``prod``) along the second of three dimensions.

Results are row-major, and so is what is read unless the third has one element. ``backward`` ones begin at the end.
"""
