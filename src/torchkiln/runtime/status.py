"""How a step of a graph went: what native functions answer, and which Python error a failure becomes.

``INDEX_ERROR`` and ``RANGE_ERROR`` are both positions out of range: an IndexError, and a RuntimeError for the
operators where eager raises that.
"""

from __future__ import annotations

OK, TORCH_ERROR, WRONG_RESULT, PYTHON_ERROR, INDEX_ERROR, NO_MEMORY, WRONG_INPUT, RANGE_ERROR = range(8)
