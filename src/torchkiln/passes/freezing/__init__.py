"""Passes on inference graphs that move work from calls to weights: what is computed from weights alone is hoisted.

They run in rounds until none changes the graph, since one makes room for another. Values change by rounding only.
"""

from __future__ import annotations

from torchkiln.config import Settings
from torchkiln.graph.manager import Pass, Rounds
from torchkiln.passes.freezing.batch_norm import fold_batch_norms

INFERENCE = frozenset({"inference"})


def prepares_weights(settings: Settings) -> bool:
    """Whether passes may round otherwise to have more computed from weights alone."""
    return settings.prepare_weights and settings.precision != "eager"


FREEZING = Rounds((Pass("fold_batch_norm", fold_batch_norms, kinds=INFERENCE, wanted=prepares_weights),))
