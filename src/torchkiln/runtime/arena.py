"""The pool of arenas: memory for the values inside a graph, kept between calls and shared by all graphs.

A running call holds one block; blocks no call is using wait in a few slots. The pool itself is native code in
:mod:`torchkiln.codegen.llvm.support.arena`; this is the view of it from Python.
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
    addresses = support.addresses()
    return ArenaStats(
        blocks=ctypes.c_int64.from_address(addresses["kiln_arena_blocks"]).value,
        bytes=ctypes.c_int64.from_address(addresses["kiln_arena_bytes"]).value,
    )


def clear_arena() -> None:
    """Give back every block that no running call holds."""
    ctypes.CFUNCTYPE(None)(support.addresses()["kiln_arena_clear"])()
