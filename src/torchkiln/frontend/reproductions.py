"""A failed compilation leaves a Python file that reproduces it, and says how to run it."""

from __future__ import annotations

import hashlib
import logging
import sys
from pathlib import Path

import torch.fx

from torchkiln.config import Settings
from torchkiln.errors import CompileError, UnsupportedError
from torchkiln.graph.fake import value_key
from torchkiln.graph.program_text import constants_as_inputs, file_text
from torchkiln.user_files import cache_folder, write_whole

_log = logging.getLogger(__name__)


def reproduction_command(gm: torch.fx.GraphModule, error: CompileError, settings: Settings) -> str | None:
    """The command that reproduces ``error`` on ``gm``; None where no file is to be written, or none can be.

    The file has the graph and the dtypes, sizes and strides of its inputs, with random numbers for their values.
    """
    folder = _folder(settings)
    if folder is None:
        return None
    try:
        key = value_key(gm.graph)
        known = [node.meta.get(key) for node in gm.graph.find_nodes(op="placeholder")]
        graph, inputs = constants_as_inputs(gm, known)
        text = file_text(graph, inputs, failure=error.reason())
        path = folder / f"failed_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        write_whole(path, text.encode())
    except (UnsupportedError, OSError, RuntimeError, ValueError) as problem:
        _log.info("no file reproduces this failure: %s", problem)
        return None
    return f"{Path(sys.executable).name} {path}"


def _folder(settings: Settings) -> Path | None:
    if settings.reproductions is not None:
        return Path(settings.reproductions)
    folder = cache_folder() if settings.cache else None
    return None if folder is None else folder / "reproductions"
