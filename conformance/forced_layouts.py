"""Layouts changed by force: every operator of a compiled graph is handed its arguments in other layouts than eager's.

A pass in two slots puts a copy with permuted strides in front of every call. Results of operators that take any strides
get the strides that follow from that. In front of all others, the compiler must bring eager's strides back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from torchkiln.graph.effects import mutated_arguments
from torchkiln.graph.fake import fake_mode_of, same_strides, size_hint
from torchkiln.graph.manager import Pass, register_pass, unregister_pass
from torchkiln.graph.operators import Strides, strides_taken
from torchkiln.graph.strides import keep_output_strides, recompute, restrided_for, returned_values
from torchkiln.graph.weights import is_packed_weight

_NAME = "forced_layouts"
_SLOTS = (("joint", "post"), ("post_grad", "priority_2"))


def orders(dims: int) -> list[tuple[int, ...]]:
    """Orders of dimensions other than row by row: reversed, channels last, and the last dimension outermost."""
    found = [tuple(reversed(range(dims))), (0, *range(2, dims), 1), (dims - 1, *range(dims - 1))]
    return found if dims > 2 else found[:1] if dims == 2 else []


@contextmanager
def forced_layouts() -> Iterator[None]:
    """Graphs compiled meanwhile have their layouts changed by force."""
    for stage, slot in _SLOTS:
        register_pass(stage, slot, Pass(_NAME, force_layouts))
    try:
        yield
    finally:
        for stage, slot in _SLOTS:
            unregister_pass(stage, slot, _NAME)


def force_layouts(graph_module: torch.fx.GraphModule) -> bool:
    """Copy what each operator reads into memory of another order; the graph returns what it did, laid out as it was."""
    graph = graph_module.graph
    mode = fake_mode_of(graph)
    if mode is None:
        return False
    promised = returned_values(graph)
    changed = 0
    for node in list(graph.nodes):
        if not _is_changed(node):
            continue
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for source in node.all_input_nodes:
            if is_packed_weight(source):  # in the library's own layout, which no copy has
                continue
            if _has_other_layouts(source.meta.get("val")) and source not in mutated_arguments(node):
                with mode, torch.no_grad():
                    copies[source] = restrided_for(node, source, _laid_out(source.meta["val"], changed))[-1]
                changed += 1
        if not copies:
            continue
        node.args, node.kwargs = torch.fx.map_arg(
            (node.args, node.kwargs),
            lambda source: copies.get(source, source),  # noqa: B023 (called here)
        )
        if strides_taken(node.target) is Strides.ANY:
            recompute(graph, node)
    if changed:
        keep_output_strides(graph, promised)
    return changed > 0


def _is_changed(node: torch.fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return node.op == "call_function"
    return (
        isinstance(target, torch._ops.OpOverload) and not target.is_view and not target.name().startswith("aten::sym_")
    )


def _has_other_layouts(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    return sum(size_hint(size) > 1 for size in value.shape) > 1


def _laid_out(value: torch.Tensor, count: int) -> torch.Tensor:
    """A fake tensor like ``value``, in another order than it has; ``count`` chooses among them."""
    choices = orders(value.dim())
    order = choices[count % len(choices)]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    made = value.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
    if same_strides(made, value):
        return value.clone(memory_format=torch.contiguous_format)
    return made
