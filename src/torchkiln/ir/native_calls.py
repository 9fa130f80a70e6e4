"""Extern calls that native code does itself: no operator of torch runs."""

from __future__ import annotations

from torchkiln.graph.native_operators import CHECK, SORT
from torchkiln.ir.program import ExternCall


def is_check(call: ExternCall) -> bool:
    """Whether ``call`` is a check rather than an operator of torch."""
    return call.target is CHECK


def is_sort(call: ExternCall) -> bool:
    """Whether ``call`` sorts rows in native code."""
    return call.target is SORT


def is_native(call: ExternCall) -> bool:
    return is_check(call) or is_sort(call)
