"""Dynamo's counters of captured graphs, which AOTAutograd's own backends advance too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.utils import counters


@contextmanager
def counted() -> Iterator[None]:
    """Tell Dynamo's counters that AOTAutograd was called, and how it went.

    Dynamo reads "total" to know which of the graphs that it cuts a DDP module into went through AOTAutograd, so only
    those are counted there that do not run eagerly.
    """
    try:
        yield
    except TensorifyScalarRestartAnalysis:
        raise
    except Exception:
        counters["aot_autograd"]["not_ok"] += 1
        raise
    count_captured_graph()


def count_captured_graph() -> None:
    """Count one graph that AOTAutograd traced, now or when its result was cached."""
    counters["aot_autograd"]["total"] += 1
    counters["aot_autograd"]["ok"] += 1
