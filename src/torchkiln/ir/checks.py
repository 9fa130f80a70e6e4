"""The step that checks positions read from memory: an extern call that native code does itself.

Kernels that index by data replace a position out of range by 0, so that nothing wild is read; a loop over all
positions tells whether there was one, and this step, between the launches, turns that into eager's error.
"""

from __future__ import annotations

import builtins
from functools import cache

import torch

from torchkiln.ir.program import ExternCall


def _check_index(bad: torch.Tensor, error: str, what: str) -> None:
    if bool(bad.any()):
        raise getattr(builtins, error)(f"index out of range in {what}")


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    library.define("check_index(Tensor bad, str error, str what) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("check_index", _check_index, "CPU")
    torch.library.register_fake("kiln::check_index", lambda bad, error, what: None, lib=library)
    return library


_library()
CHECK_INDEX: torch._ops.OpOverload = torch.ops.kiln.check_index.default
"""``bad`` is one flag, ``error`` the name of the exception eager raises, ``what`` the operator in words."""


def is_check(call: ExternCall) -> bool:
    """Whether ``call`` is a check rather than an operator of torch."""
    return call.target is CHECK_INDEX
