"""Higher-order operators that torch itself can take apart: their own definition, traced and put in their place."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx
from torch._C import DispatchKey
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.graph.decompositions import decompositions
from torchkiln.graph.fake import attribute_of, fake_mode_of
from torchkiln.graph.source import blame

# Their definition is plain tensor code with no loop or branch that depends on data.
_EXPANDED = frozenset({"flex_attention", "hints_wrapper", "out_dtype", "strict_mode"})


def expand_higher_order(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    changed = False
    for node in list(graph.nodes):
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _EXPANDED:
            with blame(node):
                _expand(graph_module, node, target)
            changed = True
    return changed


def _expand(graph_module: torch.fx.GraphModule, node: torch.fx.Node, target: torch._ops.HigherOrderOperator) -> None:
    definition = target.py_kernels[DispatchKey.CompositeExplicitAutograd]
    tensors: list[torch.fx.Node] = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]

    def call(*values: torch.Tensor) -> Any:
        known = dict(zip(tensors, values, strict=True))

        def value_of(source: torch.fx.Node) -> Any:
            if source in known:
                return known[source]
            if source.op == "get_attr":
                return attribute_of(graph_module, str(source.target))
            return source.meta["val"]

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
        return definition(*args, **kwargs)

    mode = fake_mode_of(graph_module.graph)
    assert mode is not None
    examples = [source.meta["val"] for source in tensors]
    with mode, torch.no_grad():
        table = decompositions()
        traced = make_fx(call, decomposition_table=table)(*examples)
        functional = torch.func.functionalize(traced, remove="mutations")
        body = make_fx(functional, decomposition_table=table)(*examples)
    _put_in_place(graph_module, node, body, tensors)


def _put_in_place(
    graph_module: torch.fx.GraphModule,
    node: torch.fx.Node,
    body: torch.fx.GraphModule,
    arguments: list[torch.fx.Node],
) -> None:
    graph = graph_module.graph
    copies: dict[torch.fx.Node, Any] = {}
    given = iter(arguments)
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(given)
            elif inner.op == "output":
                result = torch.fx.map_arg(inner.args[0], copies.__getitem__)
            else:
                if inner.op == "get_attr":
                    inner = _move_attribute(graph_module, body, inner)
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
                copies[inner].meta["stack_trace"] = node.meta.get("stack_trace")
    if isinstance(result, (tuple, list)):
        for item in list(node.users):
            position = item.args[1]
            assert item.target is operator.getitem
            assert isinstance(position, int)
            item.replace_all_uses_with(result[position])
            graph.erase_node(item)
    else:
        node.replace_all_uses_with(result)
    graph.erase_node(node)


def _move_attribute(
    graph_module: torch.fx.GraphModule, body: torch.fx.GraphModule, node: torch.fx.Node
) -> torch.fx.Node:
    """Give what a node of ``body`` reads a name in ``graph_module`` that is not taken."""
    value = attribute_of(body, str(node.target))
    number = 0
    while hasattr(graph_module, f"_expanded{number}"):
        number += 1
    setattr(graph_module, f"_expanded{number}", value)
    node.target = f"_expanded{number}"
    return node
