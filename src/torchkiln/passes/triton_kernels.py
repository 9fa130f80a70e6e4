"""Calls of kernels that users wrote in Triton, as calls of one operator that writes to its arguments.

torch traces such a call in a functional form of its own, which clones what the kernel writes to. It becomes the
functional form that mutating operators have, so that what holds for those holds for it: a later pass
(:mod:`torchkiln.passes.post_grad.mutating_calls`) writes in place where the old values are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._higher_order_ops.triton_kernel_wrap import (
    get_mutated_tensors,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

from torchkiln.errors import UnsupportedError
from torchkiln.graph.insertion import inherited
from torchkiln.graph.nodes import calls_of
from torchkiln.graph.program_memory import NOTED, ProgramMemory
from torchkiln.graph.source import blame
from torchkiln.graph.triton_kernels import TRITON_KERNEL, Description


@dataclass(frozen=True)
class _Launch:
    """A call of one of torch's operators, read; kernel and constants by their numbers in torch's tables.

    ``cloned`` are the arguments that the kernel writes to, in the functional form.
    """

    kernel: int
    constants: int
    grid: Any
    descriptors: Any
    arguments: dict[str, Any]
    cloned: tuple[str, ...]


def _read(node: torch.fx.Node) -> _Launch:
    given: dict[str, Any] = dict(node.kwargs)
    numbers = given["kernel_idx"], given["constant_args_idx"]
    cloned = tuple(given.get("tensors_to_clone", ()))
    return _Launch(*numbers, given["grid"], given["tma_descriptor_metadata"], dict(given["kwargs"]), cloned)


def call_triton_kernels(graph_module: torch.fx.GraphModule) -> bool:
    graph = graph_module.graph
    functional = calls_of(graph, triton_kernel_wrapper_functional)
    mutating = calls_of(graph, triton_kernel_wrapper_mutation)
    for node in functional:
        with blame(node):
            _replace_functional(node)
    for node in mutating:
        with blame(node):
            _replace_mutating(node)
    return bool(functional or mutating)


def _replace_functional(node: torch.fx.Node) -> None:
    launch = _read(node)
    # A tensor that is written to as several arguments is one tensor to the kernel.
    bases = list(dict.fromkeys(launch.arguments[name] for name in launch.cloned))
    text, given = _described(launch, set(bases))
    written = given["written"]
    views = {f"_written_{k}_base_index": bases.index(tensor) for k, tensor in enumerate(written)}
    keywords: dict[str, Any] = {"read": given["read"], "numbers": given["number"], "text": text}
    keywords |= {"_written_length": len(written), **views, "_all_bases": bases}
    with node.graph.inserting_before(node):
        made = node.graph.call_function(auto_functionalized_v2, (TRITON_KERNEL,), keywords)
    results = node.meta.get("val")
    places = {name: 1 + bases.index(launch.arguments[name]) for name in launch.cloned}
    made.meta = inherited(node)
    if isinstance(results, dict):
        by_place = {place: results[name] for name, place in places.items()}
        made.meta["val"] = (None, *(by_place[1 + k] for k in range(len(bases))))
    # One memory only where it is one node: torch's functional form keeps views of one memory apart, too.
    tensors = dict.fromkeys((*bases, *given["read"]))
    memory: dict[Any, Any] = {tensor: ProgramMemory(k) for k, tensor in enumerate(tensors)}
    made.meta[NOTED] = torch.fx.map_arg(keywords, lambda source: memory.get(source))
    for item in list(node.users):
        item.args = (made, places[str(item.args[1])])
    node.graph.erase_node(node)


def _replace_mutating(node: torch.fx.Node) -> None:
    """A call that a graph is given with, beside other writes in place."""
    launch = _read(node)
    fake: Any = torch.fx.map_arg(launch.arguments, lambda source: source.meta.get("val"))
    names = get_mutated_tensors(launch.kernel, launch.constants, fake, launch.descriptors)
    text, given = _described(launch, {launch.arguments[name] for name in names})
    with node.graph.inserting_before(node):
        made = node.graph.call_function(TRITON_KERNEL, (given["written"], given["read"], given["number"], text))
    made.meta = inherited(node)
    made.meta["val"] = None
    node.graph.erase_node(node)


def _described(launch: _Launch, written: set[torch.fx.Node]) -> tuple[str, dict[str, list[Any]]]:
    """The call as text, with the tensors and numbers that are given to it beside."""

    def kind_of(item: Any) -> str:
        value = item.meta.get("val") if isinstance(item, torch.fx.Node) else item
        if isinstance(value, torch.Tensor):
            return "written" if item in written else "read"
        if isinstance(value, torch.SymInt):
            return "number"
        raise UnsupportedError(f"a Triton kernel that is given a {type(value).__name__}")

    description = Description(kind_of)
    text = description.text(launch.kernel, launch.constants, launch.grid, launch.descriptors, launch.arguments)
    return text, description.given
