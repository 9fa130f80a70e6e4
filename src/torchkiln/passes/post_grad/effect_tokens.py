"""Calls whose order matters, without the tokens that kept them in order while torch traced the graph.

AOTAutograd hands a token from each such call to the next. From here on the order of the nodes says the same: dead-code
removal, fusion and scheduling keep calls with effects, and keep them in order.
"""

from __future__ import annotations

import operator

import torch
import torch.fx
from torch._higher_order_ops.effects import with_effects


def remove_effect_tokens(graph_module: torch.fx.GraphModule) -> bool:
    """Call every operator directly; the last token returned is then the first one taken, which nobody looks at."""
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        if node.target is not with_effects:
            continue
        token, target, *arguments = node.args
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(token, torch.fx.Node):
            continue  # lowering says what it is that it cannot do
        with graph.inserting_before(node):
            call = graph.call_function(target, tuple(arguments), dict(node.kwargs))
        call.meta = {key: value for key, value in node.meta.items() if key != "val"}
        returned = node.meta["val"][1:]
        several = len(target._schema.returns) > 1
        call.meta["val"] = tuple(returned) if several else returned[0] if returned else None
        _read_directly(graph, node, call, token, several=several)
        graph.erase_node(node)
        if token.op == "placeholder":
            token.meta["val"] = None  # what comes in at run time is None
        changed = True
    return changed


def _read_directly(
    graph: torch.fx.Graph, node: torch.fx.Node, call: torch.fx.Node, token: torch.fx.Node, *, several: bool
) -> None:
    """Replace the readers of ``node``, a tuple of a token and results, by readers of ``call``."""
    for item in list(node.users):
        assert item.target is operator.getitem
        position = item.args[1]
        assert isinstance(position, int)
        if position == 0:
            item.replace_all_uses_with(token)
        elif several:
            with graph.inserting_before(item):
                result = graph.call_function(operator.getitem, (call, position - 1))
            result.meta = dict(item.meta)
            item.replace_all_uses_with(result)
        else:
            item.replace_all_uses_with(call)
        graph.erase_node(item)
