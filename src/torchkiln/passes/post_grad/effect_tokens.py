"""Calls whose order matters, without the tokens that kept them in order while torch traced the graph.

AOTAutograd hands a token from each such call to the next. From here on the order of the nodes says the same: dead-code
removal, fusion and scheduling keep calls with effects, and keep them in order.
"""

from __future__ import annotations

import operator

import torch
import torch.fx
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from torchkiln.graph.fake import attribute_of

_TOKEN = "kiln_effect_token"


def remove_effect_tokens(graph_module: torch.fx.GraphModule) -> bool:
    """Call every operator directly; the last token returned is then the first one taken, which nobody looks at."""
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        if node.target is invoke_subgraph:
            changed |= _take_tokens_from_region(graph_module, node)
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
        _mark(token)
        changed = True
    return changed


def _mark(token: torch.fx.Node) -> None:
    """A token that comes in is None at run time, not the tensor it was while tracing.

    One that torch made while tracing, around a branch, is a constant that stays fake.
    """
    if token.op == "placeholder":
        token.meta["val"] = None
        token.meta[_TOKEN] = True
    owner = token.graph.owning_module
    if token.op == "get_attr" and owner is not None:
        setattr(owner, str(token.target), torch.empty(0))


def _take_tokens_from_region(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Call a region, whose own tokens are gone already, without the tokens it was given and gave back."""
    source, identifier, *operands = node.args
    assert isinstance(source, torch.fx.Node)
    body = attribute_of(graph_module, str(source.target))
    inputs = body.graph.find_nodes(op="placeholder")
    tokens = {
        inner: given
        for inner, given in zip(inputs, operands, strict=True)
        if _TOKEN in inner.meta and isinstance(given, torch.fx.Node)
    }
    if not tokens:
        return False
    returned = body.graph.output_node().args[0]
    for item in list(node.users):
        result = returned[item.args[1]]
        if result in tokens:
            item.replace_all_uses_with(tokens[result])
            node.graph.erase_node(item)
    kept = [None if inner in tokens else given for inner, given in zip(inputs, operands, strict=True)]
    node.args = (source, identifier, *kept)
    for given in tokens.values():
        _mark(given)
    return True


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
