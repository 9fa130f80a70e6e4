"""The interpreter of calling conventions: compiled graphs, called without AOTAutograd's wrapper.

That wrapper serves aliases, tensor subclasses, tokens and autocast, and asks about them at each call. Time of one small
operation outside of native code, 15 µs of it Dynamo's:

| | wrapper | here |
|---|---|---|
| forward | 39 µs | 17 µs |
| forward and backward | 107 µs | 51 µs |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchkiln.artifact.convention import CallingConvention, CompiledFunction, Tangent
from torchkiln.errors import NotPlainError
from torchkiln.runtime.batched_gradients import is_batched, with_batched_gradients
from torchkiln.runtime.executable import load
from torchkiln.runtime.tracing import not_traced

Function = Callable[..., Any]


def load_function(function: CompiledFunction) -> Function:
    """A compiled captured graph, ready to be called in this process as the captured graph was."""
    convention = function.convention
    forward = load(function.forward)
    backward = load(function.backward) if function.backward is not None else None
    run = training_call(convention, forward, backward) if backward is not None else inference_call(convention, forward)
    in_structure = results_in(convention.structure)
    if convention.consumed is not None:
        return with_nested_inputs(lambda inputs: in_structure(run(inputs)), convention.consumed)
    return lambda *inputs: in_structure(run([*inputs]))


def inference_call(convention: CallingConvention, graph: Function) -> Function:
    """A function of one list of inputs that returns the results; ``graph`` takes such a list too."""
    return _with_effects(convention, graph)


def training_call(convention: CallingConvention, forward: Function, backward: Function) -> Function:
    """A function of one list of inputs that returns results with gradients; both graphs take one list.

    It does not serve transforms of torch.func.
    """
    apply = _autograd_function(convention, forward, backward)
    return _with_effects(convention, lambda inputs: apply(*inputs))


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


def _with_effects(convention: CallingConvention, run: Function) -> Function:
    """``run``, and what a call does to its inputs and results besides: versions advance, dynamic sizes are marked."""
    dynamic = [(k, set(result.dynamic)) for k, result in enumerate(convention.results) if result.dynamic]
    mutated = convention.mutated
    if not dynamic and not mutated:
        return run
    mark = _name_of_mark()

    def call(inputs: list[Any]) -> Any:
        if mutated:
            torch.autograd.graph.increment_version([inputs[position] for position in mutated])
        results = run(inputs)
        for position, dimensions in dynamic:
            if results[position] is not None:  # an operator may leave a result out
                setattr(results[position], mark, dimensions.copy())
        return results

    return call


@cache
def _name_of_mark() -> str:
    """The attribute that names dynamic sizes: Dynamo expects them to change when it compiles what reads the tensor."""
    from torch._functorch._aot_autograd import runtime_wrappers

    marks = hasattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")
    return "_dynamo_propagated_dynamic_indices" if marks else "_dynamo_weak_dynamic_indices"


def _autograd_function(convention: CallingConvention, forward: Function, backward: Function) -> Function:
    returned, numbers = len(convention.results), convention.saved_numbers
    without_gradient = [k for k, result in enumerate(convention.results) if not result.requires_grad]
    gradients = _gradients(convention, backward)

    class CompiledGraphs(torch.autograd.Function):
        @staticmethod
        @not_traced
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            results = forward(list(inputs))
            outputs = tuple(results[:returned])
            end = len(results) - numbers
            # A view would keep the graph alive that it was made in.
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
            return tuple(gradients(arguments, given))

    # Past the ``apply`` in Python, which is there for torch.func transforms.
    apply: Function = super(torch.autograd.Function, CompiledGraphs).apply
    return apply


def _gradients(convention: CallingConvention, backward: Function) -> Function:
    """Gradients of inputs from what was saved, which is added to and emptied, and the gradients of results."""
    wanted = [tangent.result for tangent in convention.tangents]
    # The tangents are the last arguments of a backward.
    expected = [(k - len(wanted), tangent) for k, tangent in enumerate(convention.tangents)]

    def of_any_layout(arguments: list[Any]) -> Any:
        for position, tangent in expected:
            given = arguments[position]
            if given.stride() != tangent.strides:
                arguments[position] = _laid_out(given, tangent)
        return backward(arguments)

    of_any_layout._boxed_call = True  # type: ignore[attr-defined]
    run = with_batched_gradients(of_any_layout)

    def gradients(saved: list[Any], given: Sequence[Any]) -> Any:
        saved += [given[result] for result in wanted]
        return run(saved)

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
