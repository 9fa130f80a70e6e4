"""Transposing a square tile of values in registers."""

from __future__ import annotations

from torchkiln.codegen.llvm.instructions import InstructionList, shuffle


def transposed(f: InstructionList, rows: list[str], element: str) -> list[str]:
    """The columns of a square tile given by its rows, a power of two: log2 as many rounds of two-row exchanges."""
    side = len(rows)
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
            for row, wanted in ((first, low), (second, high)):
                following[row] = shuffle(f, element, side, current[first], current[second], wanted)
        current = following
        distance *= 2
    return current
