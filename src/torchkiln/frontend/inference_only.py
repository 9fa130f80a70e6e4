"""Graphs that are to be frozen are for inference: one that gradients are asked of is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.errors import OptionError

_REFUSAL = (
    "Freezing is for inference, and this call would record gradients: call the model under torch.no_grad() or"
    " torch.inference_mode()."
)


def reject_training(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: Settings) -> None:
    """Raise OptionError where ``freezing`` is set and gradients would be recorded."""
    if not settings.freezing or not torch.is_grad_enabled():
        return
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in (*inputs, *gm.parameters())):
        raise OptionError(_REFUSAL)
