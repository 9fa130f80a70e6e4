"""How a step of a graph went: what native functions answer, and which Python error a failure becomes."""

from __future__ import annotations

OK, TORCH_ERROR, WRONG_RESULT, PYTHON_ERROR, INDEX_ERROR, NO_MEMORY, WRONG_INPUT, CHECK_FAILED = range(8)

# What a kernel leaves in its error cell: 0, or one of these.
OUT_OF_RANGE, NO_SCRATCH = 1, 2
