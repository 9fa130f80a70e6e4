"""What AOTAutograd writes on results: which of their sizes depend on sizes of inputs.

Dynamo expects such a size to change when it compiles what reads the result. A way past AOTAutograd's wrapper writes the
same on its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]
# The number of a result, the name of an attribute, and its value.
Mark = tuple[int, str, set[int]]


def marks(results: Sequence[Any]) -> list[Mark]:
    """The marks on the results of a call that has gone AOTAutograd's way."""
    return [
        (position, name, value)
        for position, result in enumerate(results)
        for name, value in getattr(result, "__dict__", {}).items()  # an operator may leave a result out: None
        if name.startswith("_dynamo_") and isinstance(value, set)
    ]


def with_marks(function: Function, marks: Sequence[Mark]) -> Function:
    """``function``, which returns a sequence, with ``marks`` on its results."""
    if not marks:
        return function

    def call(*inputs: Any) -> Any:
        results = function(*inputs)
        for position, name, sizes in marks:
            setattr(results[position], name, sizes.copy())
        return results

    return call
