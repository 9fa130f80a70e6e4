"""Equal computations done once: two nodes with one operator and the same arguments become one node."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.effects import has_effect, mutated_arguments

_aten = torch.ops.aten

# Uninitialized memory: every call must give memory of its own, as each may be scratch for another operator.
_UNINITIALIZED = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
                            "aten::new_empty_strided"})  # fmt: skip


def merge_common_subexpressions(graph_module: torch.fx.GraphModule) -> bool:
    """Two results that both leave the graph stay two tensors: the user may write to one of them."""
    graph = graph_module.graph
    aliases = Aliases(graph)
    returned = set(aliases.returned)
    seen: dict[Hashable, torch.fx.Node] = {}
    writes = 0
    changed = False
    for node in list(graph.nodes):
        if mutated_arguments(node):
            writes += 1  # what was read before a write is not what is read after it
            continue
        key = _key(node, writes)
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


def _key(node: torch.fx.Node, writes: int) -> Hashable | None:
    target = node.target
    if node.op == "get_attr":
        return "get_attr", target
    if node.op != "call_function":
        return None
    if node.meta.get("unbacked_bindings"):
        return None  # it names a size, which others use by that name
    if isinstance(target, torch._ops.OpOverload):
        if has_effect(node) or target._schema.name in _UNINITIALIZED:
            return None
    elif target is not operator.getitem:
        return None
    arguments = _hashable((node.args, node.kwargs))
    return None if arguments is None else (target, arguments, writes)


def _hashable(value: object) -> Hashable | None:
    """A key equal for equal arguments only: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    if isinstance(value, (list, tuple)):
        items = [_hashable(item) for item in value]
        return None if None in items else ("list", *items)
    if isinstance(value, dict):
        pairs = [(name, _hashable(item)) for name, item in sorted(value.items())]
        return None if any(item is None for _, item in pairs) else ("dict", *pairs)
    if isinstance(value, slice):
        return _hashable(("slice", value.start, value.stop, value.step))
    if isinstance(value, torch.fx.Node):
        return "node", value
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
                                           torch.memory_format)):  # fmt: skip
        return type(value), repr(value)
    return None
