"""Operators that backward repeats in another form, since what they did beside computing their value is done."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from torchkiln.partition.projections import computing_node, is_projection

_aten = torch.ops.aten
_TRAINED_NORM = _aten._native_batch_norm_legit_functional.default
_PLAIN_NORM = _aten._native_batch_norm_legit.no_stats
_PLAIN_RESULTS = 3


def repeated_form(node: torch.fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator and arguments that give the value of ``node`` again; None where its own do.

    Batch norm in training also moves its running statistics, whose old values are gone by then. What it computes does
    not depend on them.
    """
    if node.target is not _TRAINED_NORM or len(node.args) != 8 or node.args[5] is not True:
        return None
    x, weight, bias, _mean, _variance, *rest = node.args
    return _PLAIN_NORM, (x, weight, bias, *rest)


def repeat_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What ``node`` reads when it is computed again."""
    form = repeated_form(node)
    if form is None:
        return node.all_input_nodes
    found: dict[torch.fx.Node, None] = {}
    torch.fx.map_arg(form[1], found.setdefault)
    return list(found)


def is_part_of_repeat(node: torch.fx.Node) -> bool:
    """Whether ``node``, where it is one of several results, is one that the repeated form has too."""
    if not is_projection(node) or repeated_form(computing_node(node)) is None:
        return True
    place = node.args[1]
    return isinstance(place, int) and place < _PLAIN_RESULTS
