"""From an FX node back to the line the user wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.fx

from torchkiln.errors import CompileError, NodeFailure

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')


def source_line(node: torch.fx.Node) -> str | None:
    """``model.py:12 in forward: y = self.linear(x)`` for the innermost frame that made ``node``, if it is known."""
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return None
    lines = trace.splitlines()
    for position in range(len(lines) - 1, -1, -1):
        frame = _FRAME.search(lines[position])
        if frame is None:
            continue
        text = f"{frame['file']}:{frame['line']}"
        if frame["function"]:
            text += f" in {frame['function'].strip()}"
        code = lines[position + 1].strip() if position + 1 < len(lines) else ""
        return f"{text}: {code}" if code else text
    return None


@contextmanager
def blame(node: torch.fx.Node) -> Iterator[None]:
    """Failures inside the block name ``node`` and the user's line; the innermost block wins."""
    try:
        yield
    except (CompileError, NodeFailure):
        raise
    except Exception as error:
        raise NodeFailure(str(node), source_line(node)) from error
