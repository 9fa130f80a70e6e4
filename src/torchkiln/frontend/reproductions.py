"""A failed compilation leaves a Python file that reproduces it, and says how to run it."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import sys
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.errors import CompileError, UnsupportedError
from torchkiln.graph.fake import SYMBOLIC, value_key
from torchkiln.graph.modes import modes_now
from torchkiln.graph.program_text import constants_as_inputs, file_text
from torchkiln.user_files import cache_folder, write_whole

_log = logging.getLogger(__name__)
# Where files go, and what a check sets itself.
_OF_THE_CHECK = frozenset({"fallback", "adaptive", "cache", "cache_dir", "rng", "reproductions"})


def reproduction_command(gm: torch.fx.GraphModule, error: CompileError, settings: Settings) -> str | None:
    """The command that reproduces ``error`` on ``gm``; None where no file is to be written, or none can be.

    The file has the graph and the dtypes, sizes and strides of its inputs, with random numbers for their values, and
    the settings that are not the defaults.
    """
    if settings.reproductions == os.devnull:
        return None
    try:
        key = value_key(gm.graph)
        known = [_given(node.meta.get(key)) for node in gm.graph.find_nodes(op="placeholder")]
        graph, inputs = constants_as_inputs(gm, known)
        options = reproduction_options(settings, dynamic=any(map(_is_symbolic, known)))
        text = file_text(graph, inputs, failure=error.reason(), options=options)
        path = _folder(settings) / f"failed_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
        write_whole(path, text.encode())
    except (UnsupportedError, OSError, RuntimeError, ValueError) as problem:
        _log.info("no file reproduces this failure: %s", problem)
        return None
    return shlex.join([sys.executable, str(path.resolve())])


def reproduction_options(settings: Settings, *, dynamic: bool) -> dict[str, Any]:
    """What a file that reproduces a failure gives to its check: settings, but for some of its own, and modes."""
    changed = {
        item.name: value
        for item in fields(settings)
        if item.name not in _OF_THE_CHECK and (value := getattr(settings, item.name)) != item.default
    }
    return {"dynamic": dynamic, **({"settings": changed} if changed else {}), **modes_now()}


def _given(value: Any) -> Any:
    """An input as the program gave it; where there are no gradients, none requires one."""
    return value if torch.is_grad_enabled() or not isinstance(value, torch.Tensor) else value.detach()


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(n, SYMBOLIC) for n in (*value.shape, *value.stride()))
    return isinstance(value, SYMBOLIC)


def _folder(settings: Settings) -> Path:
    if settings.reproductions is not None:
        return Path(settings.reproductions)
    folder = cache_folder() if settings.cache else None
    return _temporary_folder() if folder is None else folder / "reproductions"


@cache
def _temporary_folder() -> Path:
    """One for this process, which nobody else can write to."""
    return Path(tempfile.mkdtemp(prefix="torchkiln_reproductions_"))
