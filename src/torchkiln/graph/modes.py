"""Modes around a graph that change what it computes and are not in it: autocast, and the default dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def modes_now() -> dict[str, dict[str, str]]:
    """``modes``, by the names that :func:`in_modes` takes: those in force; empty where they are torch's defaults."""
    found = {}
    if torch.is_autocast_enabled("cpu"):
        found["autocast"] = _name(torch.get_autocast_dtype("cpu"))
    if torch.get_default_dtype() is not torch.float32:
        found["default_dtype"] = _name(torch.get_default_dtype())
    return {"modes": found} if found else {}


@contextmanager
def in_modes(*, autocast: str | None = None, default_dtype: str | None = None) -> Iterator[None]:
    """Inside the block these modes hold, given as names of dtypes; one that is not given stays as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if default_dtype is None else getattr(torch, default_dtype))
    try:
        if autocast is None:
            yield
        else:
            with torch.autocast("cpu", getattr(torch, autocast)):
                yield
    finally:
        torch.set_default_dtype(before)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
