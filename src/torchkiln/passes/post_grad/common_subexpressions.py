"""Common subexpression elimination: two nodes with one operator and the same arguments become one node."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
import torch.fx

from torchkiln.graph.aliases import Aliases
from torchkiln.graph.effects import has_effect, mutated_arguments
from torchkiln.graph.nodes import replace
from torchkiln.graph.operators import Kind, kind_of
from torchkiln.graph.saved_values import saved_for_backward


def merge_common_subexpressions(graph_module: torch.fx.GraphModule) -> bool:
    """Two results that both leave the graph stay two tensors: the user may write to one of them.

    Nothing writes to what forward saves for backward, so two saved values may become one.
    """
    graph = graph_module.graph
    aliases = Aliases(graph)
    leaving = _Leaving(graph, aliases)
    written = {_origin(root)[0] for root in aliases.written}
    seen: dict[Hashable, torch.fx.Node] = {}
    mergeable: dict[object, bool] = {}
    writes = 0
    changed = False
    for node in list(graph.nodes):
        if mutated_arguments(node):
            writes += 1  # what was read before a write is not what is read after it
            continue
        key = _key(node, writes, mergeable)
        if key is None or _origin(aliases.root(node))[0] in written:
            continue
        first = seen.setdefault(key, node)
        if first is node or not leaving.may_merge(node, first):
            continue
        leaving.merge(node, first)
        replace(node, first)
        changed = True
    return changed


# Where a tensor is in the tuples and lists that an operator returns.
_Path = tuple[object, ...]


def _origin(root: torch.fx.Node) -> tuple[torch.fx.Node, _Path]:
    """The operator that makes the memory of ``root``, and which of its results that is."""
    path: _Path = ()
    while root.target is operator.getitem and isinstance(root.args[0], torch.fx.Node):
        root, path = root.args[0], (root.args[1], *path)
    return root, path


class _Leaving:
    """What memory leaves the graph, by the operator that makes it; kept up to date while nodes are merged."""

    def __init__(self, graph: torch.fx.Graph, aliases: Aliases) -> None:
        self._aliases = aliases
        output = graph.output_node()
        self._results = set(output.all_input_nodes)
        self._shown: dict[torch.fx.Node, set[_Path]] = {}
        self._saved: dict[torch.fx.Node, set[_Path]] = {}
        saved = saved_for_backward(output)
        results = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
        for position, value in enumerate(results):
            if isinstance(value, torch.fx.Node):
                made_by, path = _origin(aliases.root(value))
                (self._saved if position in saved else self._shown).setdefault(made_by, set()).add(path)

    def may_merge(self, node: torch.fx.Node, first: torch.fx.Node) -> bool:
        """Whether ``node`` may become ``first``, which computes the same."""
        if self._aliases.root(node) is not node:  # a view, of the same memory
            return node not in self._results or first not in self._results
        none: set[_Path] = set()
        shown, saved = self._shown.get(node, none), self._saved.get(node, none)
        shown_there, saved_there = self._shown.get(first, none), self._saved.get(first, none)
        return not (shown & shown_there or shown & saved_there or saved & shown_there)

    def merge(self, node: torch.fx.Node, first: torch.fx.Node) -> None:
        if node in self._results:
            self._results.add(first)
        for leaving in (self._shown, self._saved):
            if node in leaving:
                leaving.setdefault(first, set()).update(leaving.pop(node))


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
    """Append what tells ``value`` from other arguments; False where nothing does.

    1, 1.0 and True differ, as do 0.0 and -0.0. One flat row: nested keys took twice as long.
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
