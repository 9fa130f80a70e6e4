"""Extern calls that native code does itself: no operator of torch runs."""

from __future__ import annotations

from torchkiln.graph.native_operators import CHECK, SCAN, SORT
from torchkiln.ir.program import ExternCall


def is_check(call: ExternCall) -> bool:
    """Whether ``call`` is a check rather than an operator of torch."""
    return call.target is CHECK


def is_computed(call: ExternCall) -> bool:
    """Whether native code computes the results of ``call``, into memory that it is given."""
    return call.target in (SCAN, SORT)


def is_native(call: ExternCall) -> bool:
    return is_check(call) or is_computed(call)
