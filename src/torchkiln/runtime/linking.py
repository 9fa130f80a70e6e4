"""What generated code may call: the support functions, torch, Python, and libraries of mathematical functions."""

from __future__ import annotations

from torchkiln.native.symbols import address_of
from torchkiln.runtime import support


def resolve(name: str) -> int | None:
    """The address of anything generated code may call; None where this process does not have it."""
    return support.address(name) or address_of(name)
