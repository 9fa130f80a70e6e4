"""Splitting a joint graph into the forward graph and the backward graph.

``classify`` says what nodes are, ``rules`` what is not worth recomputing, ``min_cut`` finds the smallest set to save,
``budget`` decides, ``extract`` makes both graphs.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.fx import GraphModule

from torchkiln.config import Settings
from torchkiln.partition.budget import choose_saved_values
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.extract import extract, schedule_for
from torchkiln.target import Target

_log = logging.getLogger(__name__)


def min_cut_rematerialization_partition(
    joint_module: GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    settings: Settings,
    target: Target,
    **_unused: Any,
) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward of ``joint_module``, in the calling convention of AOTAutograd."""
    info = NodeInfo(joint_module.graph, num_fwd_outputs)
    saved = choose_saved_values(info, settings, target)
    if _log.isEnabledFor(logging.DEBUG):
        kept = [node for node in saved if info.aliases.root(node) not in info.alive_anyway]
        _log.debug("forward saves %d values of %d bytes", len(kept), sum(info.nbytes[node] for node in kept))
    return extract(joint_module, info, schedule_for(info, saved))


__all__ = ["min_cut_rematerialization_partition"]
