"""One compilation at a time in a process: torch's tracers and our hash-consed expressions are shared by its threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch._dynamo.convert_frame import compile_lock

# torch 2.11 has none: there a call in another thread may be refused while this one traces.
_is_compiling: Callable[[], AbstractContextManager[None]] = getattr(
    torch.compiler, "_compile_session_context", contextlib.nullcontext
)


@contextmanager
def compile_session() -> Iterator[None]:
    """Compile as under Dynamo: with its lock, and with ``torch.compiler.is_compiling()``.

    Dynamo holds the lock while it captures a graph and calls a backend, but not in what a call compiles later: a
    backward, a copy for other sizes, a graph for forward-mode differentiation. FX notes for the whole process that it
    traces. Of two threads that trace at a time, the one to end last would leave that note for ever, and every compiled
    function would be refused as called from a tracer. ``is_compiling`` tells Dynamo that the tracer is a compiler's.
    """
    with compile_lock, _is_compiling():
        yield
