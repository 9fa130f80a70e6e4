"""A captured or functional graph as TorchScript: scripted, without mutation, frozen and optimized for inference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from torchkiln.debug.recording.graphs import target_text
from torchkiln.errors import UnsupportedError, first_line
from torchkiln.graph.nodes import nodes_in
from torchkiln.graph.source import source_line
from torchkiln.graph.subgraphs import copy_graph_module, module_of


def ts_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The graph as a scripted function. Raises UnsupportedError that names the node which TorchScript cannot take.

    For inference: TorchScript's freezing keeps no gradients of parameters.
    """
    module = copy_graph_module(gm)
    examples = dict(zip(module.graph.find_nodes(op="placeholder"), example_inputs, strict=False))
    for node in module.graph.nodes:
        _normalize(node)
        if node.op == "placeholder":
            node.type = _number_type(node, examples.get(node))
    try:
        scripted = _script(module)
    except Exception as error:
        node = _unscriptable(module)
        if node is None:
            raise UnsupportedError(f"TorchScript cannot take this graph: {first_line(error)}") from error
        line = source_line(node)
        at = f" ({line})" if line else ""
        raise UnsupportedError(
            f"TorchScript cannot take node {node.name}, a call of {target_text(node)}{at}; run this part eagerly"
        ) from error
    torch._C._jit_pass_remove_mutation(scripted.graph)
    scripted = torch.jit.freeze(scripted)
    # The method and not the module, which lacks attributes that Dynamo asks modules for.
    optimized: Callable[..., Any] = torch.jit.optimize_for_inference(scripted).forward
    return optimized


def _script(module: torch.fx.GraphModule) -> Any:
    # One that makes its code when it is first called has none to read.
    plain = torch.fx.GraphModule(module, module.graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript says that it is deprecated
        return torch.jit.script(plain.eval())


def _normalize(node: torch.fx.Node) -> None:
    """What TorchScript has no word for: overloads, devices as values, lists of several types, types of inputs."""
    if isinstance(node.target, OpOverload):
        node.target = node.target.overloadpacket
    node.type = None
    node.args = tuple(map(_plain, node.args))
    node.kwargs = {name: _plain(value) for name, value in node.kwargs.items()}


def _number_type(node: torch.fx.Node, example: Any = None) -> type | None:
    """The type that a number has in TorchScript, which takes inputs without one for tensors."""
    value = node.meta.get("example_value", node.meta.get("val", example))
    if isinstance(value, (bool, torch.SymBool)):
        return bool
    if isinstance(value, (int, torch.SymInt)):
        return int
    return float if isinstance(value, (float, torch.SymFloat)) else None


def _plain(argument: Any) -> Any:
    """An argument without devices; whole numbers beside others in a list, nested ones too, become floats."""
    if {type(leaf) for leaf in tree_leaves(argument)} == {int, float}:
        return tree_map(float, argument)
    return tree_map(lambda leaf: str(leaf) if isinstance(leaf, torch.device) else leaf, argument)


def _unscriptable(module: torch.fx.GraphModule) -> torch.fx.Node | None:
    """The first call that cannot be scripted by itself."""
    nodes: list[torch.fx.Node] = [n for n in module.graph.nodes if n.op in ("call_function", "call_method")]
    for node in nodes:
        graph = torch.fx.Graph()
        inputs = {
            argument: graph.placeholder(argument.name, type_expr=argument.type or _number_type(argument))
            for argument in nodes_in((node.args, node.kwargs))
        }
        graph.output(graph.node_copy(node, inputs.__getitem__))
        try:
            _script(module_of(module, graph))
        except Exception:
            return node
    return None
