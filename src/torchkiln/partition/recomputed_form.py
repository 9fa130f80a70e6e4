"""Batch norm is recomputed in another form: by then its running statistics have moved, which its value ignores."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from torchkiln.partition.kinds import computing_node, is_projection

_TRAINED_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_PLAIN_NORM = torch.ops.aten._native_batch_norm_legit.no_stats
_PLAIN_RESULTS = 3


def recomputed_form(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator and arguments that give the value of ``node`` in backward; None where its own do."""
    if node.target is not _TRAINED_NORM or len(node.args) != 8 or node.args[5] is not True:
        return None
    x, weight, bias, _mean, _variance, *rest = node.args
    return _PLAIN_NORM, (x, weight, bias, *rest)


def recompute_inputs(node: Node) -> list[Node]:
    """What ``node`` reads when it is recomputed."""
    form = recomputed_form(node)
    if form is None:
        return node.all_input_nodes
    found: dict[Node, None] = {}
    map_arg(form[1], found.setdefault)
    return list(found)


def has_recomputed_form(node: Node) -> bool:
    """Whether ``node``, where it is one of several results, is one that the recomputed form has too."""
    if not is_projection(node) or recomputed_form(computing_node(node)) is None:
        return True
    place = node.args[1]
    return isinstance(place, int) and place < _PLAIN_RESULTS
