"""Dead code in the captured graph: calls nobody reads that are known to do nothing else."""

from __future__ import annotations

import torch.fx

from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import may_have_effect


def remove_dead_code(graph_module: torch.fx.GraphModule) -> bool:
    return eliminate_dead_code(graph_module.graph, may_have_effect)
