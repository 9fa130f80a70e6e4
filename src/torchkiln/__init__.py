"""torchkiln compiles PyTorch models in process: ``torch.compile(model, backend="kiln")``."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

# Imported here and not on demand: importing the submodule later would put the module in place of the function.
from torchkiln.stats import reset_stats, stats

if TYPE_CHECKING:
    from torchkiln import errors
    from torchkiln.aot.compilation import aot_compile, compile_fx_aot
    from torchkiln.aot.eager_operators import (
        compile_op_with_persistent_cache,
        load_eager_op_cache,
        register_compiled_ops,
    )
    from torchkiln.aot.package import Package, load
    from torchkiln.compiler import compile_fx, compile_fx_inner
    from torchkiln.config import Settings, settings
    from torchkiln.debug.bisect import bisect
    from torchkiln.debug.minify import minify
    from torchkiln.debug.recompilations import why_recompiled
    from torchkiln.debug.recording.explain import explain
    from torchkiln.debug.recording.model import Recording
    from torchkiln.debug.shadow import shadow
    from torchkiln.freezing import freeze
    from torchkiln.memory.report import memory_report
    from torchkiln.patterns.api import graph_pass, remove_graph_pass, rewrite
    from torchkiln.patterns.explain import explain_match
    from torchkiln.runtime.prepared_weights import prepare_again

__version__ = "0.1.0"

__all__ = [
    "Package",
    "Recording",
    "Settings",
    "__version__",
    "aot_compile",
    "bisect",
    "compile_fx",
    "compile_fx_aot",
    "compile_fx_inner",
    "compile_op_with_persistent_cache",
    "errors",
    "explain",
    "explain_match",
    "freeze",
    "graph_pass",
    "load",
    "load_eager_op_cache",
    "memory_report",
    "minify",
    "prepare_again",
    "register_compiled_ops",
    "remove_graph_pass",
    "reset_stats",
    "rewrite",
    "settings",
    "shadow",
    "stats",
    "why_recompiled",
]

# Where each public name lives; importing torchkiln alone loads neither torch nor the compiler.
_HOMES = {
    "Package": "torchkiln.aot.package",
    "Recording": "torchkiln.debug.recording.model",
    "Settings": "torchkiln.config",
    "aot_compile": "torchkiln.aot.compilation",
    "bisect": "torchkiln.debug.bisect",
    "compile_fx": "torchkiln.compiler",
    "compile_fx_aot": "torchkiln.aot.compilation",
    "compile_fx_inner": "torchkiln.compiler",
    "compile_op_with_persistent_cache": "torchkiln.aot.eager_operators",
    "explain": "torchkiln.debug.recording.explain",
    "explain_match": "torchkiln.patterns.explain",
    "freeze": "torchkiln.freezing",
    "graph_pass": "torchkiln.patterns.api",
    "load": "torchkiln.aot.package",
    "load_eager_op_cache": "torchkiln.aot.eager_operators",
    "memory_report": "torchkiln.memory.report",
    "prepare_again": "torchkiln.runtime.prepared_weights",
    "minify": "torchkiln.debug.minify",
    "register_compiled_ops": "torchkiln.aot.eager_operators",
    "remove_graph_pass": "torchkiln.patterns.api",
    "rewrite": "torchkiln.patterns.api",
    "settings": "torchkiln.config",
    "shadow": "torchkiln.debug.shadow",
    "why_recompiled": "torchkiln.debug.recompilations",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("torchkiln.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _trace(folder: str) -> None:
    """Record every compilation of this process (``KILN_TRACE``)."""
    from torchkiln.debug.recording.trace import start

    start(Path(folder), values=os.environ.get("KILN_TRACE_VALUES", "") not in ("", "0"))


if os.environ.get("KILN_TRACE"):
    _trace(os.environ["KILN_TRACE"])
