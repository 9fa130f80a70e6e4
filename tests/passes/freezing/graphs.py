"""Inference graphs of modules as the passes of freezing get them, and compiled modules against eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import nn

from torchkiln.canonicalize.chains import collapse_chains
from torchkiln.graph.manager import Pass, register_pass, unregister_pass
from torchkiln.graph.subgraphs import copy_graph_module


def inference_graph(module: nn.Module, *inputs: torch.Tensor, dynamic: bool = False) -> torch.fx.Graph:
    """The graph that the joint passes get, with canonical operators and its weights marked."""
    kept: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule) -> bool:
        kept.append(copy_graph_module(graph_module))
        return False

    register_pass("joint", "priority_2", Pass("keep", keep))
    try:
        _run(module, inputs, dynamic=dynamic)
    finally:
        unregister_pass("joint", "priority_2", "keep")
    (found,) = kept
    collapse_chains(found)
    return found.graph


def _run(module: nn.Module, inputs: Sequence[Any], *, dynamic: bool = False, **options: Any) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(module.eval(), backend="kiln", dynamic=dynamic, fullgraph=True, options=options)
    with torch.no_grad():
        return compiled(*inputs)
