"""Dead code in the captured graph: calls nobody reads that are known to do nothing else."""

from __future__ import annotations

import torch.fx

from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import may_have_effect
from torchkiln.passes.pre_grad.normalize import only_computes


def remove_dead_code(graph_module: torch.fx.GraphModule) -> bool:
    return eliminate_dead_code(graph_module.graph, _is_live)


def _is_live(node: torch.fx.Node) -> bool:
    return may_have_effect(node) and not only_computes(node)
