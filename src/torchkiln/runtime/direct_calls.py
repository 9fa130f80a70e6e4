"""The interpreter of calling conventions: compiled graphs, called without AOTAutograd's wrapper.

That wrapper serves aliases, tensor subclasses and tokens, and asks about them at each call. Time of one small
operation outside of native code, 15 µs of it Dynamo's:

| | wrapper | here |
|---|---|---|
| forward | 39 µs | 17 µs |
| forward and backward | 107 µs | 51 µs |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchkiln.artifact.convention import CallingConvention, CompiledFunction, Tangent
from torchkiln.errors import ArtifactError, NotPlainError
from torchkiln.runtime.batched_gradients import any_batched, is_batched, over_slices
from torchkiln.runtime.executable import CompiledGraph, load
from torchkiln.runtime.prepared_weights import CompileUnfolded, PreparedGraph
from torchkiln.runtime.tracing import not_traced

Function = Callable[..., Any]


def load_function(function: CompiledFunction) -> Function:
    """A compiled captured graph, ready to be called in this process as the captured graph was.

    It is called as it was compiled: with inputs that require gradients where those did, and with no dual numbers or
    transforms of torch.func.
    """
    convention = function.convention
    if convention.wrapped:
        reason = f"it needs AOTAutograd's wrapper ({convention.wrapped})"
        raise ArtifactError(f"This compiled function cannot be loaded: {reason}. Compile it where it runs.")
    function.reject_incomplete()
    run = direct_call(convention, **{name: load(artifact) for name, artifact in function.graphs().items()})
    in_structure = results_in(convention.structure)
    if convention.consumed is not None:
        return with_nested_inputs(lambda inputs: in_structure(run(inputs)), convention.consumed)
    return lambda *inputs: in_structure(run([*inputs]))


def direct_call(
    convention: CallingConvention,
    compile_unfolded: CompileUnfolded | None = None,
    /,
    *,
    forward: CompiledGraph,
    backward: CompiledGraph | None = None,
    weights: CompiledGraph | None = None,
) -> Function:
    """A function of one list of inputs that returns flat results, for inference where there is no ``backward``.

    ``compile_unfolded`` as in :class:`PreparedGraph`.
    """
    if backward is None:
        graph = inference_graph(convention, compile_unfolded, forward=forward, weights=weights)
        return inference_call(convention, graph)
    return training_call(convention, forward, backward)


def inference_graph(
    convention: CallingConvention,
    compile_unfolded: CompileUnfolded | None = None,
    /,
    *,
    forward: CompiledGraph,
    weights: CompiledGraph | None = None,
) -> Function:
    """What runs an inference graph: a function of the one list of its inputs."""
    if weights is None:
        return forward.function
    return PreparedGraph(weights, forward, convention.weights, compile_unfolded)


def inference_call(convention: CallingConvention, graph: Function) -> Function:
    """A function of one list of inputs that returns the results; ``graph`` takes such a list too."""
    graph = _without_autocast(convention, graph)
    if not convention.mutated:
        return _with_marks(convention, graph)

    def call(inputs: list[Any]) -> Any:
        written = _written(convention, inputs)  # native code may take inputs out of the list
        results = graph(inputs)
        torch.autograd.graph.increment_version(written)
        return results

    return _with_marks(convention, call)


def training_call(convention: CallingConvention, forward: Function, backward: Function) -> Function:
    """A function of one list of inputs that returns results with gradients; both graphs take one list.

    It does not serve transforms of torch.func.
    """
    graphs = (graph.function if isinstance(graph, CompiledGraph) else graph for graph in (forward, backward))
    apply = _autograd_function(convention, *(_without_autocast(convention, graph) for graph in graphs))

    def call(inputs: list[Any]) -> Any:
        if torch.is_grad_enabled():
            return apply(*inputs)
        with torch.enable_grad():  # the function itself switched it on
            return apply(*inputs)

    return _with_marks(convention, call)


def results_in(structure: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """What puts flat results into ``structure``."""
    if structure.type in (tuple, list) and all(child.is_leaf() for child in structure.children()):
        flat: Callable[[Sequence[Any]], Any] = structure.type
        return flat
    return lambda results: pytree.tree_unflatten(list(results), structure)


def with_nested_inputs(run: Function, consumed: Sequence[int]) -> Function:
    """``run``, a function of one list of leaves, as a function of nested inputs, of which it empties ``consumed``."""

    def call(*nested: Any) -> Any:
        leaves = pytree.arg_tree_leaves(*nested)
        for position in consumed:
            nested[position].clear()
        return run(leaves)

    return call


def _without_autocast(convention: CallingConvention, graph: Function) -> Function:
    if not convention.autocast:
        return graph

    def call(inputs: list[Any]) -> Any:
        with torch._C._DisableAutocast():
            return graph(inputs)

    return call


def _written(convention: CallingConvention, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The inputs that a call writes to, which eager allows it to."""
    if len(inputs) != convention.inputs:
        raise TypeError(f"this graph takes {convention.inputs} inputs, got {len(inputs)}")
    written = [inputs[position] for position in convention.mutated]
    for position, tensor in zip(convention.mutated, written, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"input {position} is not a tensor")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone to get"
                " a normal tensor before doing inplace update."
            )
    return written


def _with_marks(convention: CallingConvention, run: Function) -> Function:
    """``run``, with the mark on results by which Dynamo expects sizes to change when it compiles what reads them.

    Its name differs between versions of torch. A process that has not loaded AOTAutograd has no reader of marks.
    """
    dynamic = [(k, set(result.dynamic)) for k, result in enumerate(convention.results) if result.dynamic]
    wrappers = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
    if not dynamic or wrappers is None:
        return run
    propagated = hasattr(wrappers, "mark_dynamo_propagated_dynamic_indices")
    mark = "_dynamo_propagated_dynamic_indices" if propagated else "_dynamo_weak_dynamic_indices"

    def call(inputs: list[Any]) -> Any:
        results = run(inputs)
        for position, dimensions in dynamic:
            if results[position] is not None:  # an operator may leave a result out
                setattr(results[position], mark, dimensions.copy())
        return results

    return call


def _autograd_function(convention: CallingConvention, forward: Function, backward: Function) -> Function:
    returned, numbers = len(convention.results), convention.saved_numbers
    writes = bool(convention.mutated)
    without_gradient = [k for k, result in enumerate(convention.results) if not result.requires_grad]
    gradients = _gradients(convention, backward)

    class CompiledGraphs(torch.autograd.Function):
        @staticmethod
        @not_traced
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            written = _written(convention, inputs) if writes else ()
            results = forward([*inputs])
            if written:  # before one of them is saved, with its version
                torch.autograd.graph.increment_version(written)
            outputs = tuple(results[:returned])
            saved = [*results[returned:]]
            if numbers:
                ctx.numbers = saved[-numbers:]
                del saved[-numbers:]
            for k, tensor in enumerate(saved):
                if tensor._is_view():  # it would keep the graph alive that it was made in
                    saved[k] = tensor.detach()
            ctx.save_for_backward(*saved)
            if without_gradient:
                undifferentiable = (outputs[k] for k in without_gradient)
                ctx.mark_non_differentiable(*[t for t in undifferentiable if isinstance(t, torch.Tensor)])
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
            return tuple(gradients(arguments, given))

    # Past the ``apply`` in Python of both: that of backward asks at each call whether the class has ``backward`` or
    # ``vjp`` (0.7 µs, 4 once other memory has passed through the caches), that of forward is for torch.func transforms.
    CompiledGraphs._backward_cls.apply = CompiledGraphs.backward  # type: ignore[attr-defined]
    apply: Function = super(torch.autograd.Function, CompiledGraphs).apply
    return apply


def _gradients(convention: CallingConvention, backward: Function) -> Function:
    """Gradients of inputs from what was saved, which is added to and emptied, and the gradients of results."""
    wanted = [tangent.result for tangent in convention.tangents]
    # The tangents are the last arguments of a backward.
    expected = [(k - len(wanted), tangent.strides, tangent) for k, tangent in enumerate(convention.tangents)]

    def of_any_layout(arguments: list[Any]) -> Any:
        for position, strides, tangent in expected:
            given = arguments[position]
            if given.stride() != strides:
                arguments[position] = _laid_out(given, tangent)
        return backward(arguments)

    def gradients(saved: list[Any], given: Sequence[Any]) -> Any:
        for result in wanted:
            saved.append(given[result])
        try:
            return of_any_layout(saved)
        except NotPlainError:  # raised before anything has run, with the arguments still there
            if not any_batched(saved):
                raise
            return over_slices(of_any_layout, saved)

    return gradients


def _laid_out(given: torch.Tensor, tangent: Tangent) -> torch.Tensor:
    if is_batched(given):  # each of them is laid out by itself
        raise NotPlainError("several gradients at once")
    if tangent.format is not None:
        return given.contiguous(memory_format=tangent.format)
    laid_out = torch.empty_strided(tangent.sizes, tangent.strides, dtype=given.dtype, device=given.device)
    return laid_out.copy_(given)


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
