"""Cat before pointwise: ``cat([relu(a), relu(b)])`` becomes ``relu(cat([a, b]))``.

The results are the same to the bit. A kernel for cat computes every piece behind a mask and selects, so an operation on
the pieces runs once per piece and element; on the result of the cat it runs once per element (gelu of two 512 x 512
tensors, one thread: 489 µs before, 408 µs after).
"""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.canonicalize.torch_calls import POINTWISE
from torchkiln.graph.captured_calls import concatenated, is_call, operand
from torchkiln.passes.pre_grad.rewriting import CapturedGraph, Replacement, rewrite_calls


def sink_cats(graph_module: torch.fx.GraphModule) -> bool:
    return rewrite_calls(graph_module, {torch.cat}, _sink_all)


def _sink_all(graph: CapturedGraph, node: torch.fx.Node) -> bool:
    """Move the cat ``node`` before as many pointwise operations as there are."""
    cat = _sink(graph, node)
    changed = cat is not None
    while cat is not None:
        cat = _sink(graph, cat)
    return changed


def _sink(graph: CapturedGraph, node: torch.fx.Node) -> torch.fx.Node | None:
    """Apply after the cat ``node`` what is applied to each of its parts; returns the new cat, None for no change."""
    parts, dim = concatenated(node, torch.cat) or ([], 0)
    if len(parts) < 2:
        return None
    first, target = parts[0], parts[0].target
    if first.op != "call_function" or target not in POINTWISE or not callable(target) or len(set(parts)) != len(parts):
        return None
    if not all(_same_call(part, first) and set(part.users) == {node} for part in parts):
        return None
    sources = [source for part in parts if (source := operand(part)) is not None]
    if len(sources) != len(parts) or not graph.have_one_type(sources):
        return None
    memory = graph.memory
    if not all(memory.undisturbed([source, part], part, node) for source, part in zip(sources, parts, strict=True)):
        return None
    # The backward of some of them reads the result, which autograd refuses once it is written.
    if memory.is_written_after(node):
        return None
    replacement = Replacement(graph, node)
    whole = replacement.call(torch.cat, sources, dim=dim)
    result = replacement.call(target, whole, *first.args[1:], **first.kwargs)
    if not replacement.take_place([node], [result]):
        return None
    for part in parts:
        node.graph.erase_node(part)
    return whole


def _same_call(part: torch.fx.Node, first: torch.fx.Node) -> bool:
    """Whether ``part`` applies to its tensor what ``first`` applies, with the same numbers."""
    if not is_call(part, first.target) or len(part.all_input_nodes) != 1:
        return False
    # repr tells 1 from 1.0 and 0.0 from -0.0.
    return repr((part.args[1:], part.kwargs)) == repr((first.args[1:], first.kwargs))
