"""Library calls keep the strides eager gives them, whatever the passes of a stage do to layouts before them.

The first pass of a stage notes the fake arguments of every call of an operator that does not take any strides
(:mod:`torchkiln.graph.operators`), while they are still those of eager. The last one puts copies in front of calls
whose arguments have other strides by then. Built-in passes follow the changes they make
(:mod:`torchkiln.graph.strides`) and leave nothing to do here; passes of users need not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx

from torchkiln.graph.effects import mutated_arguments
from torchkiln.graph.fake import same_sizes, same_strides, update_fake_values
from torchkiln.graph.nodes import fake_tensor
from torchkiln.graph.operators import Strides, strides_taken, takes
from torchkiln.graph.strides import recompute, restrided_for

_NOTED = "eager_arguments"
"""In the meta of a call: its operator, and its args and kwargs with fake values in place of nodes before any pass.

The operator tells whether a node that inherited this with other metadata is still that call.
"""


def note_eager_strides(graph_module: torch.fx.GraphModule) -> bool:
    """Note with what strides calls are made now, in place of what an earlier stage noted."""
    for node in _library_calls(graph_module.graph):
        arguments = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        node.meta[_NOTED] = (node.target, arguments)
    return False


def restore_eager_strides(graph_module: torch.fx.GraphModule) -> bool:
    """Copy, right before each call noted, the arguments that it would not take as they are now."""
    graph = graph_module.graph
    calls = [node for node in _library_calls(graph) if _noted(node) is not None]
    if any("val" not in source.meta for node in calls for source in node.all_input_nodes):
        update_fake_values(graph_module)
    changed = False
    for node in calls:
        copies = dict(_other_strides(node))
        if not copies:
            continue
        made = {source: restrided_for(node, source, like)[-1] for source, like in copies.items()}
        node.args, node.kwargs = torch.fx.map_arg(
            (node.args, node.kwargs),
            lambda source: made.get(source, source),  # noqa: B023 (called here)
        )
        recompute(graph, node)
        changed = True
    return changed


def _library_calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and strides_taken(node.target) is not Strides.ANY and node.all_input_nodes
    ]


def _noted(node: torch.fx.Node) -> Any:
    target, arguments = node.meta.get(_NOTED, (None, None))
    return arguments if target is node.target else None


def _other_strides(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """The arguments of ``node`` that it does not take as they are, each with a fake tensor laid out as eager has it.

    What the call writes to is left: a copy would be written to in its place.
    """
    given = (node.args, node.kwargs)
    if takes(node.target, torch.fx.map_arg(given, lambda source: source.meta.get("val"))):
        return
    written = mutated_arguments(node)
    for source, before in _pairs(given, _noted(node)):
        now = fake_tensor(source)
        if source in written or now is None or now.layout is not torch.strided:
            continue
        if same_sizes(now, before) and not same_strides(now, before):
            yield source, before


def _pairs(given: Any, noted: Any) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """Nodes of ``given`` with the fake tensors in their places in ``noted``, as far as the two are alike."""
    if isinstance(given, torch.fx.Node):
        if isinstance(noted, torch.Tensor) and noted.layout is torch.strided:
            yield given, noted
    elif isinstance(given, (tuple, list)) and isinstance(noted, (tuple, list)):
        if len(given) == len(noted):
            for item, other in zip(given, noted, strict=True):
                yield from _pairs(item, other)
    elif isinstance(given, Mapping) and isinstance(noted, Mapping):
        for name, item in given.items():
            yield from _pairs(item, noted.get(name))
