"""Equal computations done once: two nodes with one operator and the same arguments become one node."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.effects import has_effect, mutated_arguments
from torchkiln.graph.operators import Kind, kind_of


def merge_common_subexpressions(graph_module: torch.fx.GraphModule) -> bool:
    """Two results that both leave the graph stay two tensors: the user may write to one of them."""
    graph = graph_module.graph
    aliases = Aliases(graph)
    returned = set(aliases.returned)
    seen: dict[Hashable, torch.fx.Node] = {}
    mergeable: dict[object, bool] = {}
    writes = 0
    changed = False
    for node in list(graph.nodes):
        if mutated_arguments(node):
            writes += 1  # what was read before a write is not what is read after it
            continue
        key = _key(node, writes, mergeable)
        if key is None or aliases.root(node) in aliases.written:
            continue
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if aliases.root(node) in returned:
            if aliases.root(first) in returned:
                if aliases.root(node) is not aliases.root(first):
                    continue
                if node in graph.output_node().all_input_nodes:
                    continue
            returned.add(aliases.root(first))
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        changed = True
    return changed


def _key(node: torch.fx.Node, writes: int, mergeable: dict[object, bool]) -> Hashable | None:
    """Equal for nodes that compute the same; ``mergeable`` remembers the answer for every operator."""
    target = node.target
    if node.op == "get_attr":
        return "get_attr", target
    if node.op != "call_function":
        return None
    if node.meta.get("unbacked_bindings"):
        return None  # it names a size, which others use by that name
    if isinstance(target, torch._ops.OpOverload):
        known = mergeable.get(target)
        if known is None:
            # Each call of uninitialized memory may be scratch for another operator.
            known = mergeable[target] = not has_effect(node) and kind_of(target) is not Kind.UNINITIALIZED
        if not known:
            return None
    elif target is not operator.getitem:
        return None
    parts: list[Hashable] = [target, writes]
    return tuple(parts) if _flatten(node.args, parts) and _flatten(node.kwargs, parts) else None


def _flatten(value: object, parts: list[Hashable]) -> bool:
    """Append what tells ``value`` from other arguments: 1, 1.0 and True differ, as do 0.0 and -0.0.

    One flat row: keys inside of keys took twice as long, and are objects that the garbage collector walks. False where
    nothing tells.
    """
    if isinstance(value, torch.fx.Node):
        parts.append(value)
        return True
    if isinstance(value, (list, tuple)):
        parts += (list, len(value))
        return all(_flatten(item, parts) for item in value)
    if isinstance(value, dict):
        parts += (dict, len(value))
        return all(_flatten(item, parts) for pair in sorted(value.items()) for item in pair)
    if isinstance(value, slice):
        parts.append(slice)
        return all(_flatten(item, parts) for item in (value.start, value.stop, value.step))
    if value is None or isinstance(value, _CONSTANTS):
        shown: Hashable = repr(value) if isinstance(value, (float, complex)) else value
        parts += (type(value).__name__, shown)
        return True
    return False


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
