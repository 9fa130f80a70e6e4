"""Finding bugs: ``shadow`` compares every stage with eager, ``bisect`` names the step, ``minify`` shrinks the program.

``watch`` follows a compilation, ``runs``, ``float64`` and ``accuracy`` judge results, ``children`` ask in processes of
their own.
"""

from __future__ import annotations

from torchkiln.debug.bisect import BisectReport, bisect, bisect_script
from torchkiln.debug.finding import Finding, ShadowReport
from torchkiln.debug.shadow import shadow

__all__ = ["BisectReport", "Finding", "ShadowReport", "bisect", "bisect_script", "shadow"]
