"""Python's garbage collector while the compiler works."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # stages at work, in all threads
_was_on = True


@contextmanager
def no_collections() -> Iterator[None]:
    """Python looks for no garbage in cycles meanwhile; what is in no cycle is freed at once as ever.

    A stage makes objects by the hundred thousand, which Python takes as a reason to walk over all that the process
    holds, though few of them stay: two walks in the schedule of a Llama of 48 layers took 1.5 of its 5.2 s, and they
    take longer in a program that holds more. What a stage does leave is found by the next walk after it.
    This holds for the whole process until the last of the threads that compile is done.
    """
    global _inside, _was_on
    with _lock:
        if _inside == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _was_on:
                gc.enable()
