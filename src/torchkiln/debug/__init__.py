"""Finding bugs: ``shadow`` compares every stage with eager, ``bisect`` names the step, ``minify`` shrinks the program.

``watch`` follows a compilation, ``runs``, ``float64``, ``accuracy`` and ``determinism`` judge results, ``children`` ask
in processes of their own.
"""

from __future__ import annotations

from torchkiln.debug.backends import (
    debug_compile,
    draw_graph_compile,
    kiln_eager,
    kiln_passes,
    nop,
    print_compile,
)
from torchkiln.debug.bisect import BisectReport, bisect, bisect_script
from torchkiln.debug.finding import Finding, ShadowReport
from torchkiln.debug.minify import MinifyReport, minify
from torchkiln.debug.recompilations import Recompilation, Recompilations, why_recompiled
from torchkiln.debug.shadow import shadow
from torchkiln.debug.torchscript import ts_compile

__all__ = [
    "BisectReport",
    "Finding",
    "MinifyReport",
    "Recompilation",
    "Recompilations",
    "ShadowReport",
    "bisect",
    "bisect_script",
    "debug_compile",
    "draw_graph_compile",
    "kiln_eager",
    "kiln_passes",
    "minify",
    "nop",
    "print_compile",
    "shadow",
    "ts_compile",
    "why_recompiled",
]
