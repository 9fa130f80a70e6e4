"""Higher-order operators that torch itself can decompose: their own definition, traced and inlined."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch._C import DispatchKey
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.graph.decompositions import decompositions
from torchkiln.graph.fake import attribute_of, fake_mode_of
from torchkiln.graph.nodes import fake_tensor, replace, unused_attribute
from torchkiln.graph.source import blame

# Their definition is plain tensor code with no loop or branch that depends on data.
_DECOMPOSED = frozenset({"flex_attention", "hints_wrapper", "out_dtype", "strict_mode"})


def decompose_higher_order(graph_module: torch.fx.GraphModule) -> bool:
    changed = False
    for node in list(graph_module.graph.nodes):
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _DECOMPOSED:
            tensors = [source for source in node.all_input_nodes if fake_tensor(source) is not None]
            with blame(node):
                _inline(graph_module, node, _definition(graph_module, node, target, tensors), tensors)
            changed = True
    return changed


def _definition(
    graph_module: torch.fx.GraphModule,
    node: torch.fx.Node,
    target: torch._ops.HigherOrderOperator,
    tensors: list[torch.fx.Node],
) -> torch.fx.GraphModule:
    """A functional graph of ``tensors`` that computes what ``node`` does."""
    definition = target.py_kernels[DispatchKey.CompositeExplicitAutograd]

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
        return make_fx(functional, decomposition_table=table)(*examples)


def _inline(
    graph_module: torch.fx.GraphModule,
    node: torch.fx.Node,
    body: torch.fx.GraphModule,
    arguments: list[torch.fx.Node],
) -> None:
    graph = graph_module.graph
    copies: dict[torch.fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op in ("placeholder", "output"):
                continue
            if inner.op == "get_attr":
                name = unused_attribute(graph_module, "_inlined")
                setattr(graph_module, name, attribute_of(body, str(inner.target)))
                inner.target = name
            copies[inner] = graph.node_copy(inner, copies.__getitem__)
            copies[inner].meta["stack_trace"] = node.meta.get("stack_trace")
    results: Any = torch.fx.map_arg(body.graph.output_node().args[0], copies.__getitem__)
    replace(node, results)
