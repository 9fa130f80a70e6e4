"""From an FX node back to the line the user wrote."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.fx

from torchkiln.errors import CompileError, NodeFailure

# File, line, function and code of a frame.
_FRAME = re.compile(r'File "([^"]+)", line (\d+)(?:, in (.+))?(?:.*\n(.*))?')

# Tools call the user's function from there.
_CALLED_FROM = str(Path(__file__).parents[1] / "memory" / "capture.py")


def source_line(node: torch.fx.Node) -> str | None:
    """``model.py:12 in forward: y = self.linear(x)`` for the innermost frame that made ``node``, if it is known."""
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if isinstance(trace, str) else []
    if not frames or frames[-1][0] == _CALLED_FROM:
        return None
    file, line, function, code = (part.strip() for part in frames[-1])
    place = f"{file}:{line} in {function}" if function else f"{file}:{line}"
    return f"{place}: {code}" if code else place


@contextmanager
def blame(node: torch.fx.Node) -> Iterator[None]:
    """Failures inside the block name ``node`` and the user's line; the innermost block wins."""
    try:
        yield
    except (CompileError, NodeFailure):
        raise
    except Exception as error:
        raise NodeFailure(str(node), source_line(node)) from error
