"""Arguments that an operator does not read: they need not be saved for backward."""

from __future__ import annotations

import torch
import torch.fx

_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_RUNNING_STATISTICS = (3, 4)
_TRAINED = 7


def drop_unused_arguments(graph_module: torch.fx.GraphModule) -> bool:
    """The gradient of batch norm in training reads the statistics of the batch, not the running ones."""
    changed = False
    for node in graph_module.graph.find_nodes(op="call_function", target=_BATCH_NORM_BACKWARD):
        if len(node.args) <= _TRAINED or node.args[_TRAINED] is not True:
            continue
        for place in _RUNNING_STATISTICS:
            if node.args[place] is not None:
                node.update_arg(place, None)
                changed = True
    return changed
