"""Captured graphs to run passes on, and what eager and a graph must have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from torchkiln.graph.subgraphs import copy_graph_module


def capture(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> torch.fx.GraphModule:
    """The graph Dynamo captures of ``function``, taking what the function takes."""
    captured: list[torch.fx.GraphModule] = []

    def keep(graph_module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        captured.append(copy_graph_module(graph_module))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*copies(inputs))
    (graph_module,) = captured
    if not isinstance(function, torch.nn.Module) and not dynamic:
        _order_inputs(graph_module.graph, [f"L_{name}_" for name in inspect.signature(function).parameters])
    return graph_module


def _order_inputs(graph: torch.fx.Graph, names: Sequence[str]) -> None:
    """Placeholders in the order of ``names``, with one for those the function does not read."""
    present = {node.target: node for node in graph.find_nodes(op="placeholder")}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for name in names:
        if name in present:
            first.prepend(present[name])
        else:
            with graph.inserting_before(first):
                graph.placeholder(name)


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies that need gradients where the originals do, and that a function may write in place."""
    return [
        value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for value in values
    ]


def text(graph_module: torch.fx.GraphModule) -> str:
    """The calls of a graph, one a line, by the names of their nodes."""
    graph_module.graph.lint()
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
        elif node.op not in ("placeholder", "get_attr"):
            name = node.target if isinstance(node.target, str) else _function_name(node.target)
            arguments = [repr(value) for value in node.args] + [
                f"{key}={value!r}" for key, value in node.kwargs.items()
            ]
            dot = "." if node.op == "call_method" else "%" if node.op == "call_module" else ""
            lines.append(f"{node.name} = {dot}{name}({', '.join(arguments)})")
    return "\n".join(lines)


def _function_name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def assert_same(
    graph_module: torch.fx.GraphModule,
    function: Callable[..., Any],
    *inputs: Any,
    rtol: float = 0,
    atol: float = 0,
) -> None:
    """Results, what becomes of the inputs, who shares memory with whom, and gradients are those of eager."""
    graph_module.graph.lint()
    graph_module.recompile()
    given, expected_given = copies(inputs), copies(inputs)
    results, expected = _flat(graph_module(*given)), _flat(function(*expected_given))
    close = {"rtol": rtol, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(results, expected, **close)
    torch.testing.assert_close(given, expected_given, **close)
    assert [value.stride() for value in results] == [value.stride() for value in expected]
    assert [value.requires_grad for value in results] == [value.requires_grad for value in expected]
    assert _sharing(given, results) == _sharing(expected_given, expected)
    if any(value.requires_grad for value in expected):
        gradients = [_gradients(values, leaves) for values, leaves in ((results, given), (expected, expected_given))]
        torch.testing.assert_close(*gradients, rtol=max(rtol, 1e-5), atol=max(atol, 1e-5))


def _flat(returned: Any) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(returned) if isinstance(value, torch.Tensor)]


def _sharing(inputs: Sequence[Any], results: Sequence[torch.Tensor]) -> list[int]:
    """For each result the first of all tensors that has its memory."""
    memory = [value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else -1 for value in inputs]
    memory += [value.untyped_storage().data_ptr() for value in results]
    return [memory.index(address) for address in memory[len(inputs) :]]


def _gradients(results: list[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    total = sum((value * torch.randn_like(value)).sum() for value in results if value.requires_grad)
    leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    assert isinstance(total, torch.Tensor)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))
