"""Turning a square tile of values in registers."""

from __future__ import annotations

from torchkiln.codegen.llvm.operations import Instructions

TILE = 16


def transposed(f: Instructions, rows: list[str], element: str) -> list[str]:
    """The columns of a ``TILE`` x ``TILE`` tile given by its rows: log2(TILE) rounds of two-row exchanges."""
    wide = f"<{TILE} x {element}>"
    current = list(rows)
    distance = 1
    while distance < TILE:
        following = list(current)
        # Lane k of the first result keeps lanes whose bit is clear and takes the partner's, shifted; the
        # second result is the mirror image. Lanes TILE.. address the partner row.
        low = [k if not k & distance else k - distance + TILE for k in range(TILE)]
        high = [k + distance if not k & distance else k + TILE for k in range(TILE)]
        for first in range(TILE):
            if first & distance:
                continue
            second = first + distance
            a, b = current[first], current[second]
            following[first] = _shuffle(f, wide, a, b, low)
            following[second] = _shuffle(f, wide, a, b, high)
        current = following
        distance *= 2
    return current


def _shuffle(f: Instructions, wide: str, a: str, b: str, lanes: list[int]) -> str:
    order = ", ".join(f"i32 {lane}" for lane in lanes)
    return f.fresh(f"shufflevector {wide} {a}, {wide} {b}, <{TILE} x i32> <{order}>")
