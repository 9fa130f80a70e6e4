"""How the output node of a forward graph says which of its results are saved for backward."""

from __future__ import annotations

import torch.fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

try:  # torch 2.12 and later describe these apart
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsNoVcCheckAOTOutput as _Unchecked
except ImportError:
    _Unchecked = SavedForBackwardsAOTOutput  # type: ignore[assignment,misc]


def describe_saved(position: int, *, checked: bool) -> object:
    """The description of a saved value; what is ``checked`` must not be written before backward reads it."""
    return SavedForBackwardsAOTOutput(position) if checked else _Unchecked(position)


def saved_for_backward(output: torch.fx.Node) -> frozenset[int]:
    """The positions of results that only autograd sees."""
    descriptions = output.meta.get("desc") or ()
    saved = (SavedForBackwardsAOTOutput, _Unchecked)
    return frozenset(position for position, given in enumerate(descriptions) if isinstance(given, saved))
