"""Training calls of graphs that have no special cases: one autograd function over the two compiled graphs.

AOTAutograd's own wrapper serves views of inputs, mutation, tensor subclasses, tokens, autocast and more, and asks about
them at each call. Most graphs have none of that. For those the first step goes AOTAutograd's way, which compiles the
backward when it first runs; later ones take the way here. Processor time of one small operation: forward 39 µs before,
17 now (15 of them Dynamo's), with backward 107 before, 51 now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torchkiln.errors import NotPlainError
from torchkiln.frontend.batched_gradients import is_batched, with_batched_gradients
from torchkiln.frontend.dynamic_marks import Mark, marks, with_marks
from torchkiln.graph.tangents import is_tangent
from torchkiln.runtime.tracing import not_traced

Function = Callable[..., Any]


@dataclass(frozen=True)
class Tangent:
    """What the backward expects of the gradient of one output: strides, or a format where they are not yet known."""

    output: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    format: torch.memory_format | None = None

    def laid_out(self, tangent: torch.Tensor) -> torch.Tensor:
        """The gradient in the memory layout that the backward was compiled for."""
        if is_batched(tangent):  # each of them is laid out by itself
            raise NotPlainError("several gradients at once")
        if self.format is not None:
            return tangent.contiguous(memory_format=self.format)
        if tangent.stride() == self.strides:
            return tangent
        laid_out = torch.empty_strided(self.sizes, self.strides, dtype=tangent.dtype, device=tangent.device)
        return laid_out.copy_(tangent)


class PlainTraining:
    """Collects the two compiled graphs of one captured graph of so many ``inputs`` as they are made, and joins them.

    ``forward`` and ``backward`` are handed what was compiled; ``call`` is then the way past AOTAutograd's wrapper, and
    None for as long as it may not be taken. It is no way for inputs of ``torch.func`` transforms.
    """

    def __init__(self, inputs: int) -> None:
        self.call: Function | None = None
        self._inputs = inputs
        self._autocast = torch._C._is_any_autocast_enabled()  # AOTAutograd has it off where it compiles
        self._forward: Function | None = None
        self._metadata: Any = None
        self._short: Function | None = None
        self._marks: Sequence[Mark] | None = None

    def forward(self, graph: torch.fx.GraphModule, compiled: Function) -> None:
        """Told while AOTAutograd compiles the forward graph."""
        context = TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        if metadata is None or len(metadata.input_info) != self._inputs or self._autocast:
            return
        if _is_plain(metadata, graph) and _takes_list(compiled):
            self._forward, self._metadata = compiled, metadata

    def backward(self, graph: torch.fx.GraphModule, compiled: Function) -> None:
        if self._forward is None or not _takes_list(compiled):
            return
        tangents = _tangents(graph, self._metadata)
        results: Any = graph.graph.output_node().args[0]
        wanted = [info.requires_grad for info in self._metadata.input_info]
        if tangents is None or len(results) != len(wanted):
            return
        # An input whose gradient nobody computes is detached by AOTAutograd, for outputs to require none on its behalf.
        if any(result is None and asked for result, asked in zip(results, wanted, strict=True)):
            return
        self._short = _function(self._forward, compiled, self._metadata, tangents)
        self._join()

    def was_called(self, results: Sequence[Any]) -> None:
        """Told after a call has gone AOTAutograd's way, with what came back."""
        if self._forward is not None and self._marks is None:
            self._marks = marks(results)
            self._join()

    def _join(self) -> None:
        """AOTAutograd compiles a backward that needs sizes of the forward before the first call, any other after it."""
        if self._short is not None and self._marks is not None:
            self.call = with_marks(self._short, self._marks)


def _takes_list(compiled: Function) -> bool:
    return bool(getattr(compiled, "_boxed_call", False))


def _is_plain(metadata: Any, graph: torch.fx.GraphModule) -> bool:
    """Whether outputs and inputs are plain tensors that share no memory and change nothing autograd can see."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    plain_inputs = len(placeholders) == len(metadata.input_info) and all(
        type(node.meta.get("val")) in (FakeTensor, torch.SymInt, int) for node in placeholders
    )
    subclasses = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
    special = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_mutated_graph_handled_indices_seen_by_autograd,
        metadata.num_intermediate_bases,
        metadata.num_outputs_rng_offset,
        getattr(metadata, "num_tensors_saved_with_no_vc_check", 0),
        getattr(metadata, "num_opaque_objects_saved_for_bw", 0),
        getattr(metadata, "num_graphsafe_rng_states", 0),
        metadata.num_backward_tokens,
        len(metadata.tokens),
        len(metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw),
        not all(isinstance(meta, PlainTensorMeta) for meta in subclasses),
    )
    quiet = not torch.are_deterministic_algorithms_enabled()
    return plain_inputs and returns_plain_tensors(metadata) and not any(special) and quiet


def returns_plain_tensors(metadata: Any) -> bool:
    """Whether outputs are tensors that share no memory with inputs and each other.

    ``unsafe_view_alias`` is a view of a value that nobody else is given: AOTAutograd hands it out as it does any other.
    """
    kinds = (OutputType.non_alias, OutputType.unsafe_view_alias)
    return all(info.output_type in kinds and info.raw_type is FunctionalTensor for info in metadata.output_info)


def _tangents(graph: torch.fx.GraphModule, metadata: Any) -> list[Tangent] | None:
    """What the backward expects of gradients, None where that is more than the short way serves."""
    nodes = [n for n in graph.graph.find_nodes(op="placeholder") if is_tangent(n)]
    outputs = [k for k, info in enumerate(metadata.output_info) if info.requires_grad]
    if not len(nodes) == len(outputs) == len(metadata.subclass_tangent_meta):
        return None
    found = []
    for node, output, meta in zip(nodes, outputs, metadata.subclass_tangent_meta, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        sizes, strides = tuple(value.shape), tuple(value.stride())
        if all(type(number) is int for number in (*sizes, *strides)):
            found.append(Tangent(output, sizes, strides))
        elif meta.memory_format is not None and meta.memory_format.memory_format is not None:
            found.append(Tangent(output, format=meta.memory_format.memory_format))
        else:
            return None
    return found


def _function(forward: Function, backward: Function, metadata: Any, tangents: Sequence[Tangent]) -> Function:
    returned = len(metadata.output_info)
    without_gradient = [k for k, info in enumerate(metadata.output_info) if not info.requires_grad]
    wanted = [t.output for t in tangents]
    # The tangents are the last arguments of a backward.
    expected = [(k - len(tangents), t.strides, t.laid_out) for k, t in enumerate(tangents)]
    numbers = metadata.num_symints_saved_for_bw

    def of_any_layout(arguments: list[Any]) -> Any:
        for position, strides, laid_out in expected:
            tangent = arguments[position]
            if tangent.stride() != strides:
                arguments[position] = laid_out(tangent)
        return backward(arguments)

    of_any_layout._boxed_call = True  # type: ignore[attr-defined]
    run_backward = with_batched_gradients(of_any_layout)

    def gradients(arguments: list[Any], given: Sequence[Any]) -> tuple[Any, ...]:
        """``arguments`` is what was saved; it is added to, and emptied while the backward runs."""
        arguments += [given[output] for output in wanted]
        return tuple(run_backward(arguments))

    class PlainFunction(torch.autograd.Function):
        @staticmethod
        @not_traced
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            results = forward(list(inputs))
            outputs = tuple(results[:returned])
            # A view would keep the graph alive that it was made in.
            end = len(results) - numbers
            ctx.save_for_backward(*[t.detach() if t._is_view() else t for t in results[returned:end]])
            ctx.numbers = results[end:]
            if without_gradient:
                ctx.mark_non_differentiable(*[outputs[k] for k in without_gradient])
                ctx._materialize_non_diff_grads = False
            return outputs

        @staticmethod
        @not_traced
        def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
            arguments = [*ctx.numbers, *ctx.saved_tensors] if numbers else [*ctx.saved_tensors]
            ctx.maybe_clear_saved_tensors()
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    "a compiled backward cannot run inside vmap, grad or another transform of torch.func;"
                    " use the transform inside the compiled function instead"
                )
            if torch.is_grad_enabled():
                return tuple(_OnceDifferentiable.apply(gradients, arguments, given, *_differentiable(ctx, arguments)))
            return gradients(arguments, given)

    # Past the ``apply`` in Python, which is there for torch.func transforms.
    apply: Function = super(torch.autograd.Function, PlainFunction).apply
    return apply


def _differentiable(ctx: Any, saved: Sequence[Any]) -> list[torch.Tensor]:
    """What a second backward can be asked about: leaves and saved inputs, by which it gets to know that there is none.

    One tensor is there in any case, for gradients to require gradients.
    """
    leaves = [getattr(node, "variable", None) for node, _ in ctx.next_functions]
    found = [t for t in (*leaves, *saved) if isinstance(t, torch.Tensor) and t.requires_grad]
    return [torch.empty(0, requires_grad=True), *found]


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients that were asked for with ``create_graph=True``: there, but without gradients of their own."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Function, arguments: list[Any], given: Sequence[Any], *connects: torch.Tensor
    ) -> tuple[Any, ...]:
        held = [*arguments, *given]
        # Results get a gradient function, which others that hold the tensor, or a second place of it, must not see.
        results: list[Any] = []
        for gradient in gradients(arguments, given):
            known = isinstance(gradient, torch.Tensor) and any(gradient is other for other in (*held, *results))
            results.append(gradient.detach() if known else gradient)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "torch.compile with aot_autograd does not currently support double backward: a compiled function can be"
            " differentiated once from outside; use torch.func inside the compiled function instead"
        )
