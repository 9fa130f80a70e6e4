"""Dead code in a functional graph; effects, mutation and random draws stay."""

from __future__ import annotations

import torch.fx

from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect


def remove_dead_code(graph_module: torch.fx.GraphModule) -> bool:
    return eliminate_dead_code(graph_module.graph, has_effect)
