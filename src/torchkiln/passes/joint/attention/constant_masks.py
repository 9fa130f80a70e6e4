"""Masks that do not depend on the inputs: a causal one is a flag of the operator, and one that hides nothing is none.

However a program makes its causal mask (``tril``, comparing positions, a lowest number above the diagonal), it is made
of constants, so its values are known while compiling. What was added around the operator for rows that see no key goes
where no row is like that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.utils._python_dispatch import _disable_current_modes

from torchkiln.graph.effects import has_effect, is_random, may_end_the_process
from torchkiln.graph.fake import is_symbolic, same_metadata
from torchkiln.graph.nodes import calls_of, fake_tensor, replace
from torchkiln.graph.strides import keep_output_strides, propagate_strides, returned_values
from torchkiln.passes.attention_masks import HIDES

_aten = torch.ops.aten

# Operators by the place of the flag for causal attention; the mask has the name attn_mask in both.
_CAUSAL_FLAG = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 7,
}

# A mask larger than this is not computed while compiling.
_MOST_ELEMENTS = 1 << 24


def use_constant_masks(graph_module: torch.fx.GraphModule) -> bool:
    """Look at the constant masks of attention; returns whether one was simplified."""
    graph = graph_module.graph
    calls = calls_of(graph, *_CAUSAL_FLAG)
    if not any(isinstance(node.kwargs.get("attn_mask"), torch.fx.Node) for node in calls):
        return False
    constants = _Constants(graph)
    promised = returned_values(graph)
    changed = False
    moved: dict[torch.fx.Node, Any] = {}  # with the value its new readers knew
    with _disable_current_modes(), torch.no_grad():  # what follows computes with numbers
        for node in calls:
            changed |= _simplify_mask(node, constants)
        for node in list(graph.nodes):
            if "replaced" in node.meta and node.target in _NEUTRAL and node not in constants:
                source = _unchanged_by(node, constants)
                if source is not None:
                    replace(node, source)
                    moved[source] = node.meta.get("val")
    if moved:
        propagate_strides(graph, moved)
        keep_output_strides(graph, promised)
    return changed or bool(moved)


def _simplify_mask(node: torch.fx.Node, constants: _Constants) -> bool:
    mask_node = node.kwargs.get("attn_mask")
    mask = constants.value(mask_node) if isinstance(mask_node, torch.fx.Node) else None
    place = _CAUSAL_FLAG[node.target]  # type: ignore[index]
    if mask is None or (len(node.args) > place and node.args[place]):
        return False
    first = 0 if place == 4 else 1
    query, key = (node.args[position].meta["val"] for position in (first, first + 1))  # type: ignore[union-attr]
    causal = False
    if mask.count_nonzero():
        if is_symbolic(query) or is_symbolic(key) or not _is_causal(mask, query.shape[-2], key.shape[-2]):
            return False
        causal = True
    defaults = (None, None, None, 0.0, False)
    args = (*node.args, *defaults[len(node.args) :]) if place == 4 else node.args
    node.args = (*args[:place], causal, *args[place + 1 :])
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "attn_mask"}
    return True


def _is_causal(mask: torch.Tensor, queries: int, keys: int) -> bool:
    """Whether query number ``i`` sees key ``j`` just where ``j <= i``."""
    if tuple(mask.shape[-2:]) != (queries, keys):
        return False
    seen = torch.ones(queries, keys, dtype=torch.bool).tril()
    return bool(torch.where(seen, mask == 0, mask <= HIDES).all())


def _unchanged_by(node: torch.fx.Node, constants: _Constants) -> torch.fx.Node | None:
    """The operand that ``node`` returns as it is, because the other one is constant and neutral."""
    source, operand = node.args[0], node.args[1]
    if not isinstance(source, torch.fx.Node) or not isinstance(operand, torch.fx.Node):
        return None
    before, after = source.meta["val"], node.meta["val"]
    if before.dtype != after.dtype or not same_metadata(list(before.shape), list(after.shape)):
        return None
    value = constants.value(operand)
    return source if value is not None and bool((value == _NEUTRAL[node.target]).all()) else None


# The number that, as every element of the second operand, makes an operator return its first.
_NEUTRAL: dict[Any, Any] = {_aten.add.Tensor: 0, _aten.mul.Tensor: 1, _aten.masked_fill.Scalar: False}


class _Constants:
    """The values of a graph that depend on none of its inputs, computed when asked for."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._nodes: set[torch.fx.Node] = set()
        self._values: dict[torch.fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op != "call_function" or not all(source in self._nodes for source in node.all_input_nodes):
                continue
            value = fake_tensor(node)
            if value is None or is_random(node) or has_effect(node) or may_end_the_process(node):
                continue
            if value.device.type == "cpu" and not is_symbolic(value) and value.numel() <= _MOST_ELEMENTS:
                self._nodes.add(node)

    def __contains__(self, node: torch.fx.Node) -> bool:
        return node in self._nodes

    def value(self, node: torch.fx.Node) -> torch.Tensor | None:
        if node not in self._nodes:
            return None
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [source for source in current.all_input_nodes if source not in self._values]
            pending += missing
            if not missing:
                args, kwargs = torch.fx.map_arg((current.args, current.kwargs), self._values.__getitem__)
                self._values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
                pending.pop()
        found: torch.Tensor = self._values[node]
        return found
