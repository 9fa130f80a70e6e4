"""How the elements of a matrix may lie in memory for BLAS to read and write them."""

from __future__ import annotations

from torchkiln.ir.index import Extent

# BLAS counts in 32 bits.
MOST = 2**31 - 1


def leading(shape: tuple[Extent, ...], strides: tuple[Extent, ...]) -> tuple[bool, Extent] | None:
    """Whether rows (else columns) of a matrix are contiguous, and how far apart they begin; None for any other form."""
    if len(shape) != 2 or any(isinstance(n, int) and n > MOST for n in (*shape, *strides)) or 0 in shape:
        return None
    (rows, columns), (down, right) = shape, strides
    step = columns if rows == 1 else down
    if (columns == 1 or right == 1) and _at_least(step, columns):
        return True, step
    step = rows if columns == 1 else right
    if (rows == 1 or down == 1) and _at_least(step, rows):
        return False, step
    return None


def _at_least(step: Extent, size: Extent) -> bool:
    return step >= size if isinstance(step, int) and isinstance(size, int) else step == size
