"""Values that are checked at run time: ``torch.ops.kiln.check``, an extern call that native code does itself.

A loop finds out whether some value is one that eager refuses, and this step, between the launches, turns that into
eager's error. Kernels do not stop for it: those that index by data replace a position out of range by 0, so that
nothing wild is read.
"""

from __future__ import annotations

import builtins
from functools import cache

import torch

from torchkiln.ir.program import ExternCall


def _check(bad: torch.Tensor, error: str, text: str, value: torch.Tensor | None = None) -> None:
    if bool(bad.any()):
        raise getattr(builtins, error)(text if value is None else text.replace("{}", str(value.item())))


@cache
def _library() -> torch.library.Library:
    """The registration, which lives as long as the process."""
    library = torch.library.Library("kiln", "FRAGMENT")
    schema = "check(Tensor bad, str error, str text, Tensor? value=None) -> ()"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("check", _check, "CPU")
    torch.library.register_fake("kiln::check", lambda bad, error, text, value=None: None, lib=library)
    return library


_library()
CHECK: torch._ops.OpOverload = torch.ops.kiln.check.default
"""``bad`` is one flag, ``error`` is IndexError or RuntimeError as eager raises it, ``text`` says what is wrong.

The number in ``value``, where it is given, is said in place of ``{}``. Native code leaves that to Python.
"""


def is_check(call: ExternCall) -> bool:
    """Whether ``call`` is a check rather than an operator of torch."""
    return call.target is CHECK
