"""Graphs that return anything but a flat tuple, as plain FX traces do and Dynamo's do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx
from torch.utils import _pytree as pytree


def flatten_outputs(graph_module: torch.fx.GraphModule) -> Callable[[Any], Any]:
    """Make ``graph_module`` return a flat tuple, in place; the function returned here restores the structure."""
    output = graph_module.graph.output_node()
    result = output.args[0]
    if isinstance(result, (tuple, list)) and not any(isinstance(item, (tuple, list, dict)) for item in result):
        return list if isinstance(result, list) else tuple
    leaves, structure = pytree.tree_flatten(result)
    output.args = (tuple(leaves),)
    graph_module.recompile()
    return lambda values: pytree.tree_unflatten(list(values), structure)
