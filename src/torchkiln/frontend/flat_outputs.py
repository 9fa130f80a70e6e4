"""Graphs that return anything but a flat tuple, as plain FX traces do and Dynamo's do not."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree


def flatten_outputs(graph_module: torch.fx.GraphModule) -> pytree.TreeSpec:
    """Make ``graph_module`` return a flat tuple, in place; the structure it returned its results in before."""
    output = graph_module.graph.output_node()
    leaves, structure = pytree.tree_flatten(_mutable(output.args[0]))
    if structure.type is not tuple or structure.num_children != structure.num_leaves:
        output.args = (tuple(leaves),)
        graph_module.recompile()
    return structure


def _mutable(value: Any) -> Any:
    """``value`` with the lists and dictionaries that FX has made its own of."""
    if isinstance(value, immutable_list):
        return [_mutable(item) for item in value]
    if isinstance(value, immutable_dict):
        return {key: _mutable(item) for key, item in value.items()}
    return tuple(map(_mutable, value)) if type(value) is tuple else value
