"""Calls that return their argument itself, the same tensor and not a copy: dropout that is off, ``nn.Identity``."""

from __future__ import annotations

import torch
import torch.fx
import torch.nn.functional as F

# The functions whose first arguments are (input, p, training) and that hand the input back when they have nothing
# to drop. alpha_dropout and the per-channel ones take the same way out in ATen.
_DROPOUTS = frozenset({F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout})
_TRAINING_DEFAULT = {F.alpha_dropout: False, F.feature_alpha_dropout: False}


def remove_identities(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in list(graph_module.graph.nodes):
        source = _returned_argument(graph_module, node)
        if source is None:
            continue
        node.replace_all_uses_with(source)
        graph_module.graph.erase_node(node)
        changed = True
    return changed


def _returned_argument(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.Node | None:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        first = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        return first if isinstance(module, torch.nn.Identity) and isinstance(first, torch.fx.Node) else None
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return None
    source = _argument(node, 0, "input", None)
    rate = _argument(node, 1, "p", 0.5)
    training = _argument(node, 2, "training", _TRAINING_DEFAULT.get(node.target, True))
    # A rate outside [0, 1] is an error of the user's that eager reports.
    off = training is False and isinstance(rate, (int, float)) and 0 <= rate <= 1
    off |= node.target is F.dropout and isinstance(rate, (int, float)) and rate == 0
    return source if off and isinstance(source, torch.fx.Node) else None


def _argument(node: torch.fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
