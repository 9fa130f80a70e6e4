"""Keeping Dynamo out of run-time code.

A compiled function that calls ``backward()`` runs compiled graphs while Dynamo traces every frame that starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def not_traced(function: F) -> F:
    """Mark ``function`` and all it calls as nothing to trace; the mark is on its code and costs nothing a call."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # Dynamo then warns about frames it cannot trace, and runs them as they are
        return function
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
