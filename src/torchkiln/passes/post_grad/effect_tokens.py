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
from torchkiln.graph.nodes import replace

_TOKEN = "kiln_effect_token"


def remove_effect_tokens(graph_module: torch.fx.GraphModule) -> bool:
    """Call every operator directly. The last token returned is then the first one taken, which is unused."""
    changed = False
    for node in list(graph_module.graph.nodes):
        if node.target is invoke_subgraph:
            changed |= _remove_tokens_of_region(graph_module, node)
        elif node.target is with_effects:
            changed |= _call_directly(node)
    return changed


def returned_tokens(graph: torch.fx.Graph) -> set[int]:
    """The positions of tokens among what a graph returns."""
    returned = graph.output_node().args[0]
    values = returned if isinstance(returned, (tuple, list)) else [returned]
    return {k for k, value in enumerate(values) if isinstance(value, torch.fx.Node) and _is_token(value)}


def _is_token(node: torch.fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    source, position = node.args
    assert isinstance(source, torch.fx.Node)
    if source.target is with_effects:
        return bool(position == 0)
    if source.target is not invoke_subgraph:
        return False
    region = source.args[0]
    assert isinstance(region, torch.fx.Node)
    assert node.graph.owning_module is not None
    return position in returned_tokens(attribute_of(node.graph.owning_module, str(region.target)).graph)


def _call_directly(node: torch.fx.Node) -> bool:
    token, target, *arguments = node.args
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(token, torch.fx.Node):
        return False  # lowering names what it cannot do
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, tuple(arguments), dict(node.kwargs))
    returned = node.meta["val"][1:]
    several = len(target._schema.returns) > 1
    call.meta = {**node.meta, "val": tuple(returned) if several else returned[0] if returned else None}
    for item in list(node.users):
        position = item.args[1]
        assert item.target is operator.getitem
        assert isinstance(position, int)
        if position and several:
            item.args = (call, position - 1)
        else:
            replace(item, call if position else token)
    node.graph.erase_node(node)
    _mark(token)
    return True


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


def _remove_tokens_of_region(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
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
            replace(item, tokens[result])
    kept = [None if inner in tokens else given for inner, given in zip(inputs, operands, strict=True)]
    node.args = (source, identifier, *kept)
    for given in tokens.values():
        _mark(given)
    return True
