"""Extern calls that native code does itself, by the address of memory: no operator of torch runs."""

from __future__ import annotations

from torchkiln.ir.checks import is_check
from torchkiln.ir.program import ExternCall
from torchkiln.ir.sorting import is_sort


def is_native(call: ExternCall) -> bool:
    return is_check(call) or is_sort(call)
