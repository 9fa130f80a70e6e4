"""Smaller graphs of the same kind: a part of the nodes, inputs in place of computed values, smaller sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor

from torchkiln.debug.first_node import node_values
from torchkiln.graph.nodes import nodes_in
from torchkiln.graph.subgraphs import module_of
from torchkiln.graph.weights import static_as


@dataclass(frozen=True)
class Candidate:
    """A graph that takes all its tensors as inputs, and values for them. Numbers are given as they are."""

    graph_module: torch.fx.GraphModule
    inputs: tuple[Any, ...]

    @property
    def calls(self) -> list[torch.fx.Node]:
        return [node for node in self.graph_module.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def outputs(self) -> list[torch.fx.Node]:
        return list(dict.fromkeys(nodes_in(self.graph_module.graph.output_node().args)))

    @property
    def elements(self) -> int:
        return sum(value.numel() for value in self.inputs if isinstance(value, Tensor))

    def values(self) -> dict[str, Any]:
        """What every node computes."""
        return node_values(self.graph_module, self.inputs)

    def program(self) -> torch.fx.GraphModule:
        self.graph_module.recompile()
        return self.graph_module


def part(
    whole: Candidate, kept: Collection[torch.fx.Node], outputs: Sequence[torch.fx.Node], values: dict[str, Any]
) -> Candidate | None:
    """The calls of ``kept`` that ``outputs`` need; what others computed is an input, with the value it had.

    None where a value is needed that cannot be an input, such as a tuple.
    """
    chosen = set(kept)
    wanted = _needed(chosen, outputs)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: list[Any] = []
    given = dict(zip(whole.graph_module.graph.find_nodes(op="placeholder"), whole.inputs, strict=True))
    for node in whole.graph_module.graph.nodes:
        if node not in wanted or node.op == "output":
            continue
        if node in chosen and node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        value = given.get(node, values.get(node.name))
        if not isinstance(value, (Tensor, int, float, bool)):
            return None
        if node not in given and isinstance(value, Tensor) and value.dtype.is_floating_point:
            value = value.detach().clone().requires_grad_(_trains(whole.inputs))
        with graph.inserting_before(_first_call(graph)):
            copies[node] = graph.placeholder(node.name)
        inputs.append(value)
    graph.output(tuple(copies[node] for node in outputs if node in copies))
    return Candidate(module_of(whole.graph_module, graph), tuple(inputs))


def _first_call(graph: torch.fx.Graph) -> torch.fx.Node:
    """The place before which inputs go: the first call, or the end."""
    return next((node for node in graph.nodes if node.op != "placeholder"), graph._root)


def _needed(chosen: Collection[torch.fx.Node], outputs: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    pending, found = list(outputs), set(outputs)
    while pending:
        node = pending.pop()
        if node in chosen:
            new = [argument for argument in node.all_input_nodes if argument not in found]
            found.update(new)
            pending += new
    return found


def _trains(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def ends_of(nodes: Sequence[torch.fx.Node], values: dict[str, Any]) -> list[torch.fx.Node]:
    """Those of ``nodes`` that give a tensor and that none of them reads."""
    inside = set(nodes)
    ends = [node for node in nodes if not any(user in inside for user in node.users)]
    return [node for node in ends if isinstance(values.get(node.name), Tensor)]


def bypassed(whole: Candidate, node: torch.fx.Node, values: dict[str, Any]) -> Iterator[Candidate]:
    """Candidates with an argument of the same sizes and dtype, or the number 1, in place of one call."""
    value = values.get(node.name)
    if not isinstance(value, Tensor):
        return
    for argument in node.all_input_nodes:
        known = values.get(argument.name)
        if isinstance(known, Tensor) and (known.shape, known.dtype) == (value.shape, value.dtype):
            yield _replaced(whole, node, argument)
    yield _replaced(whole, node, 1.0)


def _replaced(whole: Candidate, node: torch.fx.Node, replacement: Any) -> Candidate:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, Any] = {}

    def copied(argument: torch.fx.Node) -> Any:
        return copies[argument]

    for old in whole.graph_module.graph.nodes:
        if old is node:
            copies[old] = copies[replacement] if isinstance(replacement, torch.fx.Node) else replacement
        elif old.op == "output":
            graph.output(torch.fx.map_arg(old.args[0], copied))
        else:
            copies[old] = graph.node_copy(old, copied)
    return without_unused(Candidate(module_of(whole.graph_module, graph), whole.inputs))


def without_unused(candidate: Candidate) -> Candidate:
    """Without calls and inputs that no result needs."""
    graph = candidate.graph_module.graph
    found = part(candidate, [n for n in graph.nodes if n.op != "output"], candidate.outputs, {})
    return candidate if found is None else found


def smaller_sizes(candidate: Candidate) -> Iterator[Candidate]:
    """Candidates with one of the sizes smaller, wherever it appears as a size of an input or a number in a call."""
    sizes = sorted({int(n) for v in candidate.inputs if isinstance(v, Tensor) for n in v.shape if n > 1}, reverse=True)
    for size in sizes:
        for smaller in dict.fromkeys((2, 3, size // 4, size // 2)):
            if 1 < smaller < size:
                yield _resized(candidate, {size: smaller})


def _resized(candidate: Candidate, sizes: dict[int, int]) -> Candidate:
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def resize(argument: Any) -> Any:
        plain = isinstance(argument, int) and not isinstance(argument, bool)
        return sizes.get(argument, argument) if plain else argument

    for node in candidate.graph_module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op not in ("placeholder", "output"):
            copies[node].args = _mapped(copies[node].args, resize)
            copies[node].kwargs = _mapped(copies[node].kwargs, resize)
    inputs = tuple(_cut(value, sizes) for value in candidate.inputs)
    return Candidate(module_of(candidate.graph_module, graph), inputs)


def _mapped(arguments: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(arguments, dict):
        return {name: _mapped(value, change) for name, value in arguments.items()}
    if isinstance(arguments, (tuple, list)):
        changed = [_mapped(value, change) for value in arguments]
        return changed if isinstance(arguments, list) else tuple(changed)
    return change(arguments)


def _cut(value: Any, sizes: dict[int, int]) -> Any:
    """The first elements of a tensor along every dimension of a size that changes, in the same order in memory."""
    if not isinstance(value, Tensor):
        return sizes.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value
    shape = [sizes.get(int(n), int(n)) for n in value.shape]
    if shape == list(value.shape):
        return value
    order = sorted(range(value.dim()), key=lambda dim: value.stride(dim), reverse=True)
    made = torch.empty([shape[dim] for dim in order], dtype=value.dtype)
    made = made.permute([order.index(dim) for dim in range(value.dim())]) if order else made
    source = value.detach()[tuple(slice(0, n) for n in shape)]
    return static_as(made.copy_(source).requires_grad_(value.requires_grad), value)
