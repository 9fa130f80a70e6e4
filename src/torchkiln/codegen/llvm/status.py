"""How a step of a graph went: what native functions answer, where a failing step goes, which error it becomes."""

from __future__ import annotations

OK, TORCH_ERROR, WRONG_RESULT, PYTHON_ERROR, INDEX_ERROR, NO_MEMORY, WRONG_INPUT, VALUE_ERROR = range(8)
ZERO_DIVISION, OVERFLOW, NO_NUMBER, NO_LAUNCH, NO_CARD_MEMORY = range(8, 13)

# In place of a dtype in an input's descriptor: an unused input, an integer, an opaque tensor, of which nothing is
# compared, and a tensor that is compared when its memory is first used.
UNUSED, NUMBER, OPAQUE, COMPARED_LATER = -1, -2, -3, -4

# Beside a dtype in a descriptor: memory whose address is a multiple of 16, and memory of a card, whose number follows.
ALIGNED, ON_CARD, NUMBER_SHIFT = 1 << 16, 1 << 17, 20

# What an input that is not as described may have: with other strides a copy in its place, and where its memory is not
# aligned one that kernels read and write beside it.
COPY_STRIDED, COPY_ALIGNED = 1, 2

EXITS = {
    "failed": TORCH_ERROR,
    "mismatched": WRONG_RESULT,
    "raised": PYTHON_ERROR,
    "refused_index": INDEX_ERROR,
    "refused": VALUE_ERROR,
    "refused_zero": ZERO_DIVISION,
    "refused_overflow": OVERFLOW,
    "refused_nan": NO_NUMBER,
    "no_memory": NO_MEMORY,
    "kernel_failed": NO_MEMORY,
    "not_launched": NO_LAUNCH,
    "no_card_memory": NO_CARD_MEMORY,
}
"""Blocks that a failing step of a graph goes to, with each handle it owns in a slot, and the status they stand for."""

REFUSED = {
    "IndexError": "refused_index",
    "RuntimeError": "refused",
    "ZeroDivisionError": "refused_zero",
    "OverflowError": "refused_overflow",
    "ValueError": "refused_nan",
}
"""The block for a value that is refused with a Python error of this class."""
