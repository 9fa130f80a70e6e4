"""The calling convention of a captured graph, read off what AOTAutograd knows while its graphs are compiled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from torchkiln.artifact.convention import CallingConvention, Result, Tangent
from torchkiln.graph.tangents import is_tangent
from torchkiln.graph.weights import given_inputs

# Inputs and results of a functional graph that are parts of a tensor subclass outside of it.
_PARTS_OF_SUBCLASSES = (
    *(descriptors.SubclassGetAttrAOTInput, descriptors.SubclassSizeAOTInput, descriptors.SubclassStrideAOTInput),
    *(descriptors.SubclassGetAttrAOTOutput, descriptors.SubclassSizeAOTOutput, descriptors.SubclassStrideAOTOutput),
)


ALIASED_RESULTS = "results that share memory with inputs or with each other"
OTHER_RESULTS = "results that are no plain tensors"


@dataclass(frozen=True)
class Captured:
    """What is known of a captured graph before it is traced.

    ``consumed`` as in :class:`CallingConvention`. ``has_parameters``: the graph has parameters or buffers of its own,
    which become inputs. ``inlines_hooks``: hooks for saved tensors are on that AOTAutograd makes part of the graph.
    """

    inputs: int
    structure: pytree.TreeSpec
    consumed: tuple[int, ...] | None
    has_parameters: bool
    autocast: bool
    inlines_hooks: bool


@dataclass(frozen=True)
class JointFacts:
    """What only the joint graph tells: the fake tangents, and for each input whether backward computes its gradient."""

    tangents: tuple[Any, ...]
    has_gradient: tuple[bool, ...]


def joint_facts(joint: torch.fx.GraphModule, forward_results: int) -> JointFacts:
    """Read before the partition; ``joint`` returns ``forward_results`` results of forward, then the gradients."""
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if is_tangent(node)]
    returned: Any = pytree.tree_leaves(joint.graph.output_node().args[0])
    return JointFacts(
        tuple(node.meta.get("val") for node in tangents),
        tuple(gradient is not None for gradient in returned[forward_results:]),
    )


def inference_convention(
    captured: Captured, metadata: Any, graph: torch.fx.GraphModule, *, served: Collection[str] = ()
) -> CallingConvention:
    """How an inference ``graph`` is called; ``metadata`` is what AOTAutograd found out about it.

    ``served`` are the needs of a wrapper that whoever calls the graph serves.
    """
    return CallingConvention(
        captured.inputs,
        tuple(Result(info.requires_grad, tuple(sorted(info.dynamic_dims or ()))) for info in metadata.output_info),
        captured.structure,
        mutated=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
        consumed=captured.consumed,
        autocast=captured.autocast,
        wrapped=_why_wrapped(captured, metadata, graph, served),
    )


def training_convention(
    captured: Captured, metadata: Any, forward: torch.fx.GraphModule, joint: JointFacts
) -> CallingConvention:
    """How the graphs of a captured graph with gradients are called, of which ``forward`` is the first."""
    convention = inference_convention(captured, metadata, forward)
    if convention.wrapped:
        return convention
    tangents = _tangents(joint, metadata)
    return replace(
        convention,
        saved_numbers=metadata.num_symints_saved_for_bw,
        tangents=tuple(tangents or ()),
        wrapped=_why_wrapped_in_training(captured, metadata, joint, tangents),
    )


def _why_wrapped(captured: Captured, metadata: Any, graph: torch.fx.GraphModule, served: Collection[str]) -> str:
    """What of AOTAutograd's wrapper a call needs beside ``served``, the first of it; empty where it needs nothing.

    ``unsafe_view_alias`` is a view of a value that nobody else is given: it is handed out as any other result.
    """
    placeholders = given_inputs(graph.graph)
    plain_results = (OutputType.non_alias, OutputType.unsafe_view_alias)
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
    described = (*(node.meta.get("desc") for node in placeholders), *(graph.graph.output_node().meta.get("desc") or ()))
    needs = {
        "tensor subclasses": not all(isinstance(meta, PlainTensorMeta) for meta in subclasses)
        or any(isinstance(part, _PARTS_OF_SUBCLASSES) for part in described),
        # One of them and two inputs that became one leave as many inputs as were captured.
        "parameters of the captured graph itself": captured.has_parameters,
        "results that AOTAutograd does not describe": len(described) < len(placeholders) + len(metadata.output_info),
        "other inputs than those captured": not len(metadata.input_info) == len(placeholders) == captured.inputs,
        "inputs that are no plain tensors": any(
            type(node.meta.get("val")) not in (FakeTensor, torch.SymInt, int) for node in placeholders
        ),
        ALIASED_RESULTS: metadata.num_intermediate_bases
        or any(info.output_type not in plain_results for info in metadata.output_info),
        OTHER_RESULTS: any(i.raw_type is not FunctionalTensor for i in metadata.output_info),
        "inputs written to after the graph": metadata.num_mutated_inp_runtime_indices,
        "random states as inputs": metadata.num_outputs_rng_offset or getattr(metadata, "num_graphsafe_rng_states", 0),
        "effect tokens": len(metadata.tokens),
        "a change of the gradient mode": getattr(metadata, "grad_enabled_mutation", None) is not None,
    }
    return next((need for need, found in needs.items() if found and need not in served), "")


def _why_wrapped_in_training(
    captured: Captured, metadata: Any, joint: JointFacts, tangents: Sequence[Tangent] | None
) -> str:
    """As :func:`_why_wrapped`, for what only gradients need."""
    wanted = [info.requires_grad for info in metadata.input_info]
    needs = {
        "saved values without a version": getattr(metadata, "num_tensors_saved_with_no_vc_check", 0),
        "saved values that are no tensors": getattr(metadata, "num_opaque_objects_saved_for_bw", 0),
        "effect tokens in backward": metadata.num_backward_tokens,
        "inputs written to in backward": len(metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw),
        "hooks for saved tensors in the graph": captured.inlines_hooks,
        "gradients of unknown layout": tangents is None,
        # AOTAutograd detaches them, for results to require no gradient on their behalf.
        "inputs whose gradient nobody computes": len(joint.has_gradient) != len(wanted)
        or any(asked and not there for asked, there in zip(wanted, joint.has_gradient, strict=True)),
    }
    return next((need for need, found in needs.items() if found), "")


def _tangents(joint: JointFacts, metadata: Any) -> list[Tangent] | None:
    """The layouts backward is compiled for, None where one is neither known strides nor a memory format."""
    results = [k for k, info in enumerate(metadata.output_info) if info.requires_grad]
    if not len(joint.tangents) == len(results) == len(metadata.subclass_tangent_meta):
        return None
    found = []
    for value, result, meta in zip(joint.tangents, results, metadata.subclass_tangent_meta, strict=True):
        if not isinstance(value, torch.Tensor):
            return None
        sizes, strides = tuple(value.shape), tuple(value.stride())
        if all(type(number) is int for number in (*sizes, *strides)):
            found.append(Tangent(result, sizes, strides))
        elif meta.memory_format is not None and meta.memory_format.memory_format is not None:
            found.append(Tangent(result, format=meta.memory_format.memory_format))
        else:
            return None
    return found
