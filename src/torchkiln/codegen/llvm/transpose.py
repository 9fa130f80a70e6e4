"""Transposing a square tile of values in registers."""

from __future__ import annotations

from torchkiln.codegen.llvm.operations import Instructions


def transposed(f: Instructions, rows: list[str], element: str) -> list[str]:
    """The columns of a square tile given by its rows, a power of two: log2 as many rounds of two-row exchanges."""
    side = len(rows)
    wide = f"<{side} x {element}>"
    current = list(rows)
    distance = 1
    while distance < side:
        following = list(current)
        # Lane k of the first result keeps lanes whose bit is clear and takes the partner's, shifted; the
        # second result is the mirror image. Lanes from ``side`` on address the partner row.
        low = [k if not k & distance else k - distance + side for k in range(side)]
        high = [k + distance if not k & distance else k + side for k in range(side)]
        for first in range(side):
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
    return f.fresh(f"shufflevector {wide} {a}, {wide} {b}, <{len(lanes)} x i32> <{order}>")
