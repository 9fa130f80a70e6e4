"""Graphs with symbolic sizes: a copy of the graph for each combination of sizes that comes along.

A copy has no symbols left: sizes are constants in it, nodes that computed sizes are gone, and its inputs are those of
the original, of which the ones that carry sizes are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from torchkiln.errors import UnsupportedError
from torchkiln.frontend.copies_by_key import CopiesByKey
from torchkiln.graph.fake import attribute_of, is_symbolic
from torchkiln.graph.higher_order import HIGHER_ORDER
from torchkiln.graph.source import blame
from torchkiln.native.tensor_classes import is_no_subclass
from torchkiln.runtime.tracing import not_traced

_log = logging.getLogger(__name__)

CompiledGraph = Callable[[list[Any]], Any]

_NUMBERS = (bool, int, float)


def has_symbolic_inputs(graph_module: torch.fx.GraphModule) -> bool:
    """Whether an input is, or has in its sizes or strides, an integer that is not known yet."""
    return any(is_symbolic(node.meta.get("val")) for node in graph_module.graph.find_nodes(op="placeholder"))


class SpecializedGraphs:
    """Calls, and compiles on first need, the copy of a graph for the sizes of the arguments at hand."""

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        compile_for: Callable[[torch.fx.GraphModule, Sequence[Any]], CompiledGraph],
    ) -> None:
        self._boxed_call = True  # on the instance: torch's wrappers take over the attributes of what they wrap
        self._graph_module = graph_module
        self._compile_for = compile_for
        self._copies = CopiesByKey()
        values = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
        symbolic = [(k, isinstance(value, torch.Tensor)) for k, value in enumerate(values) if is_symbolic(value)]
        self._tensors = tuple(k for k, is_tensor in symbolic if is_tensor)
        self._numbers = tuple(k for k, is_tensor in symbolic if not is_tensor)

    @not_traced
    def __call__(self, arguments: list[Any]) -> Any:
        key = self._key(arguments)

        def compile_copy() -> CompiledGraph:
            _log.info("compiling a graph for the numbers and sizes %s", key)
            return self._compile_for(self._graph_module, arguments)

        return self._copies.get(key, compile_copy)(arguments)

    def _key(self, arguments: Sequence[Any]) -> Hashable:
        # repr tells 0.0 from -0.0 and makes NaN equal to itself.
        numbers = tuple(repr(arguments[k]) for k in self._numbers)
        return numbers, tuple(_layout(arguments[k]) for k in self._tensors)


def _layout(value: torch.Tensor) -> Hashable:
    if value.layout is not torch.strided:
        return tuple(value.shape)
    return tuple(value.shape), value.stride(), value.storage_offset()


def specialize(graph_module: torch.fx.GraphModule, arguments: Sequence[Any]) -> torch.fx.GraphModule:
    """A copy of ``graph_module`` for the numbers and for the sizes and strides of the tensors in ``arguments``."""
    mode = FakeTensorMode()
    examples = [node.meta.get("val") for node in graph_module.graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad():
        fakes = [_fake(mode, value, example) for value, example in zip(arguments, examples, strict=True)]
        return _for_values(graph_module, fakes, mode)


def _for_values(
    graph_module: torch.fx.GraphModule, inputs: Sequence[Any], mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """A copy of ``graph_module`` for these numbers and fake tensors of ``mode``."""
    graph = torch.fx.Graph()
    attributes = torch.nn.Module()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    values: dict[torch.fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "output":
            output = graph.output(torch.fx.map_arg(node.args[0], lambda n: copies.get(n, values[n])))
            output.meta = dict(node.meta)
            continue
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "get_attr":
            attribute = attribute_of(graph_module, str(node.target))
            values[node] = _fake(mode, attribute, None)
            if isinstance(attribute, torch.fx.GraphModule):
                continue  # a body, of which every call gets a copy of its own
            copies[node] = _read_attribute(graph, attributes, attribute)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            with blame(node):
                copies[node] = _copy_higher_order(graph, attributes, node, copies, values, mode)
                values[node] = copies[node].meta["val"]
        else:
            with blame(node):
                values[node] = _evaluate(node, values)
            if isinstance(values[node], _NUMBERS):
                continue  # a size: from here on a constant
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda n: _copy_or_number(n, copies, values))
        copies[node].meta = {**node.meta, "val": values[node]}
        copies[node].meta.pop("tensor_meta", None)
    module = _LazyGraphModule(attributes, graph)
    module.meta = dict(graph_module.meta)
    return module


def _read_attribute(graph: torch.fx.Graph, attributes: torch.nn.Module, value: Any) -> torch.fx.Node:
    name = f"attribute{len(graph.find_nodes(op='get_attr'))}"
    setattr(attributes, name, value)
    return graph.get_attr(name)


def _copy_higher_order(
    graph: torch.fx.Graph,
    attributes: torch.nn.Module,
    node: torch.fx.Node,
    copies: dict[torch.fx.Node, torch.fx.Node],
    values: dict[torch.fx.Node, Any],
    mode: FakeTensorMode,
) -> torch.fx.Node:
    """A call of a higher-order operator with bodies for the values at hand; ``meta["val"]`` is what it returns."""
    assert isinstance(node.target, torch._ops.HigherOrderOperator)
    name = node.target.name()
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    for_these: dict[torch.fx.GraphModule, torch.fx.GraphModule] = {}
    if name in HIGHER_ORDER:
        call = HIGHER_ORDER[name](args)
        for_these = {body: _for_values(body, call.inputs, mode) for body in call.bodies}
        result: Any = call.results(_returned_values(for_these[call.bodies[-1]]))
    else:
        result = node.target(*args, **kwargs)

    def copied(source: torch.fx.Node) -> Any:
        body = values[source]
        if isinstance(body, torch.fx.GraphModule):
            return _read_attribute(graph, attributes, for_these.get(body, body))
        return _copy_or_number(source, copies, values)

    new_args, new_kwargs = torch.fx.map_arg((node.args, node.kwargs), copied)
    copy = graph.call_function(node.target, new_args, new_kwargs)
    copy.meta["val"] = result
    return copy


def _returned_values(graph_module: torch.fx.GraphModule) -> list[Any]:
    returned = graph_module.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    return [item.meta["val"] if isinstance(item, torch.fx.Node) else item for item in returned]


def _copy_or_number(
    node: torch.fx.Node, copies: dict[torch.fx.Node, torch.fx.Node], values: dict[torch.fx.Node, Any]
) -> Any:
    value = values[node]
    return value if isinstance(value, _NUMBERS) else copies[node]


def _fake(mode: FakeTensorMode, value: Any, example: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(example, torch.Tensor) and type(value) is not type(example) and not is_no_subclass(value):
        raise UnsupportedError(f"an input of type {type(value).__name__} in a graph with symbolic sizes")
    if value.layout is not torch.strided:
        return mode.from_tensor(value, static_shapes=True)
    # The offset matters to as_strided, which counts from the start of the storage.
    whole = torch.empty(value.untyped_storage().nbytes() // value.itemsize, dtype=value.dtype, device=value.device)
    view = torch.as_strided(whole, value.shape, value.stride(), value.storage_offset())
    if value.is_conj():
        view = view.conj()
    return torch._neg_view(view) if value.is_neg() else view


def _evaluate(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    if node.op != "call_function" or not callable(node.target):
        raise UnsupportedError(f"a {node.op} node in a functional graph")
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)
