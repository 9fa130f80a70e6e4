"""How a step of a graph went: what native functions answer, and which Python error a failure becomes.

``INDEX_ERROR`` and ``VALUE_ERROR`` are values that eager refuses with an IndexError and with a RuntimeError, the last
three ones that Python refuses with the error of that name.
"""

from __future__ import annotations

OK, TORCH_ERROR, WRONG_RESULT, PYTHON_ERROR, INDEX_ERROR, NO_MEMORY, WRONG_INPUT, VALUE_ERROR = range(8)
ZERO_DIVISION, OVERFLOW, NO_NUMBER = range(8, 11)

# In place of a dtype in an input's descriptor: an input that is not read, one that is a whole number, an opaque
# tensor, of which nothing is compared, and one that is compared when its memory is first used.
NOT_READ, NUMBER, OPAQUE, COMPARED_LATER = -1, -2, -3, -4
