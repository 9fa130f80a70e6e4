"""A frozen graph: the functional graph of an inference with its weights as attributes and constants folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torchkiln import config
from torchkiln.config import Settings
from torchkiln.errors import OptionError, noting_refusals
from torchkiln.freezing.discarded import discarded, slots
from torchkiln.frontend.aot import static_input_indices
from torchkiln.frontend.inference_only import reject_training
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect
from torchkiln.graph.fake import fake_mode_of, outside_tracing
from torchkiln.graph.manager import PassManager, PassPipeline
from torchkiln.graph.nodes import unused_attribute
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.graph.weights import is_weight, mark_weights
from torchkiln.partition.hoisting import hoist
from torchkiln.passes.freezing import FREEZING

_PASSES = PassPipeline("joint", (FREEZING,))


def freeze_graph(
    captured: torch.nn.Module, functional: torch.fx.GraphModule, inputs: Sequence[Any], *, discard: bool
) -> tuple[torch.fx.GraphModule, list[int]]:
    """See :func:`torchkiln.freeze`."""
    settings = config.resolve({"freezing": True})
    reject_training(functional, inputs, settings)
    positions = _weights(captured, inputs)
    with outside_tracing(), torch.no_grad():
        frozen, values = _prepared(functional, inputs, positions, settings)
        placeholders = frozen.graph.find_nodes(op="placeholder")[: len(inputs)]
        prepared = frozen.graph.find_nodes(op="placeholder")[len(placeholders) :]
        weights = [(node, inputs[k]) for k, node in enumerate(placeholders) if is_weight(node)]
        for node, value in (*zip(prepared, values, strict=True), *weights):
            _as_attribute(frozen, node, value)
    eliminate_dead_code(frozen.graph, has_effect)
    frozen.delete_all_unused_submodules()
    frozen.recompile()
    if discard:
        for (tensors, name), tensor in list(slots(captured)):
            tensors[name] = discarded(tensor)
    constant = {node for node, _ in weights}
    return frozen, [position for position, node in enumerate(placeholders) if node not in constant]


def _prepared(
    functional: torch.fx.GraphModule,
    inputs: Sequence[Any],
    positions: Sequence[int],
    settings: Settings,
    unfolded: frozenset[int] = frozenset(),
) -> tuple[torch.fx.GraphModule, Sequence[torch.Tensor]]:
    """A copy of the graph that takes what was computed of weights after its inputs, and these values.

    Nothing is folded into weights made of the inputs ``unfolded``, those that cannot hold it.
    """
    frozen = copy_graph_module(functional)
    if fake_mode_of(frozen.graph) is None:
        FakeTensorProp(frozen).propagate(*inputs)
    mark_weights(frozen.graph, positions, unfolded)
    PassManager(settings).run(_PASSES, frozen, kind="inference")
    hoisted = hoist(frozen)
    if hoisted is None:
        return frozen, ()
    with noting_refusals() as refusals:
        values = hoisted.weights(*(inputs[position] for position in hoisted.taken))
    if refusals.weights:
        return _prepared(functional, inputs, positions, settings, unfolded | refusals.weights)
    return frozen, values


def _weights(captured: torch.nn.Module, inputs: Sequence[Any]) -> list[int]:
    """The positions of inputs that stay the same from call to call."""
    own = {id(tensor) for _, tensor in slots(captured)}
    found = {k for k, value in enumerate(inputs) if id(value) in own or isinstance(value, torch.nn.Parameter)}
    found |= set(static_input_indices())
    for position in sorted(found):
        if isinstance(inputs[position], FakeTensor):
            raise OptionError(f"Freezing needs the values of weights, and input {position} is a fake tensor.")
    return sorted(found)


def _as_attribute(module: torch.fx.GraphModule, node: torch.fx.Node, value: torch.Tensor) -> None:
    if node.users:
        name = unused_attribute(module, "_frozen")
        module.register_buffer(name, value.detach(), persistent=True)
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(constant)
    module.graph.erase_node(node)
