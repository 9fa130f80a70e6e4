"""The pool of arenas, which all graphs share, seen from Python.

A running call holds one block, unless its arena is small enough for the stack. Idle blocks wait in a few slots
(:mod:`torchkiln.codegen.llvm.support.arena`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torchkiln.runtime import support


@dataclass(frozen=True)
class ArenaStats:
    """Blocks that exist now, in use or waiting, and their bytes."""

    blocks: int
    bytes: int


def arena_stats() -> ArenaStats:
    """What the pool holds now."""
    return ArenaStats(
        blocks=ctypes.c_int64.from_address(support.existing("kiln_arena_blocks")).value,
        bytes=ctypes.c_int64.from_address(support.existing("kiln_arena_bytes")).value,
    )


def clear_arena() -> None:
    """Give back every block that no running call holds."""
    ctypes.CFUNCTYPE(None)(support.existing("kiln_arena_clear"))()
