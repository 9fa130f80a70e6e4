"""The partition as AOTAutograd calls it."""

from __future__ import annotations

import logging
from typing import Any

import torch.fx

from torchkiln.config import Settings
from torchkiln.partition.budget import choose_saved_values
from torchkiln.partition.classify import classify
from torchkiln.partition.extract import extract, schedule_for

_log = logging.getLogger(__name__)


def min_cut_rematerialization_partition(
    joint_module: torch.fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    settings: Settings,
    static_lifetime_input_indices: Any = None,
    static_lifetime_input_nodes: Any = None,
    **_later: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and the backward of ``joint_module``, in the calling convention of AOTAutograd."""
    info = classify(joint_module.graph, num_fwd_outputs)
    saved = choose_saved_values(info.graph, info, settings.memory_budget, settings=settings)
    if _log.isEnabledFor(logging.DEBUG):
        kept = [node for node in saved if info.aliases.root(node) not in info.alive_anyway]
        _log.debug("forward saves %d values of %d bytes", len(kept), sum(info.nbytes[node] for node in kept))
    return extract(joint_module, info, schedule_for(info, saved))
