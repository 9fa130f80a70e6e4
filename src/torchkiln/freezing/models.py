"""A frozen model: compiled for inference, and with its own weights discarded where that is asked for.

The user's model keeps none of the discarded weights. What is compiled is a copy of it that shares the other tensors, so
that nobody else can reach the tensors without memory that stand for the discarded ones.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from torchkiln.backend import kiln
from torchkiln.errors import DiscardedError, OptionError
from torchkiln.freezing.discarded import Slot, discarded, slots, without_memory
from torchkiln.frontend.dynamo_exceptions import DiscardedErrorInDynamo
from torchkiln.runtime.prepared_weights import PreparedGraph, prepared_graphs

_FURTHER_CODE = (
    "A call of a frozen model needs further code, since its inputs have other sizes, strides or dtypes than the first"
    " call's, or the modes of torch are others"
)
_CHANGES_IN_TRAINING = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd)


def freeze_model(model: torch.nn.Module, options: Mapping[str, Any], *, discard: bool) -> Callable[..., Any]:
    """See :func:`torchkiln.freeze`."""
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"torchkiln.freeze takes a module, not {type(model).__name__}; wrap functions in one.")
    training = next((m for m in model.modules() if m.training and isinstance(m, _CHANGES_IN_TRAINING)), None)
    if training is not None:
        kind = type(training).__name__
        raise OptionError(f"Freezing is for inference, and a {kind} is in training mode: call model.eval() first.")
    settings = {"freezing": True, "prepare_weights": True, **options}
    if discard:
        return FrozenModel(model, settings)
    compiled: Callable[..., Any] = torch.compile(model, backend="kiln", options=settings)
    return compiled


class _Compiled(torch.nn.Module):
    """What Dynamo captures: a model that may not run eagerly once its weights are discarded."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.may_run_eagerly = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and not self.may_run_eagerly:
            raise DiscardedError("A frozen model was to run eagerly")
        return self.model(*args, **kwargs)


class FrozenModel:
    """Call it as the model. The first call prepares the weights and discards the model's own.

    Every later call compares the tensors of the user's model with those it left there. Safe to call from many threads.
    """

    def __init__(self, model: torch.nn.Module, options: Mapping[str, Any]) -> None:
        # Eager would read weights that are not there any more.
        settings = {**options, "adaptive": False, "fallback": False}
        self._model, self._copy = model, _Compiled(_copy_that_shares_tensors(model))
        self._run = torch.compile(self._copy, backend=self._compile, fullgraph=True, options=settings)
        self._first = threading.Lock()
        # Of all first calls: one that was refused may be tried again.
        self._prepared: weakref.WeakSet[PreparedGraph] = weakref.WeakSet()
        self._left: list[tuple[Slot, torch.Tensor, type]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        left = self._left
        if left is None:
            with self._first:
                if self._left is None:
                    return self._call_first(*args, **kwargs)
                left = self._left
        for (tensors, name), tensor, kind in left:
            if tensors.get(name) is not tensor or type(tensor) is not kind:  # torch.utils.swap_tensors swaps the class
                raise DiscardedError(f"The tensor {name!r} of a frozen model was replaced")
        return self._run(*args, **kwargs)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """What Dynamo calls. A refusal here leaves no code of Dynamo's behind, which might serve earlier sizes too."""
        if self._left is not None:
            raise DiscardedErrorInDynamo(str(DiscardedError(_FURTHER_CODE)))
        return kiln(graph, inputs, **options)

    def _call_first(self, *args: Any, **kwargs: Any) -> Any:
        for graph in self._prepared:
            graph.forget()
        before = prepared_graphs()
        try:
            result = self._run(*args, **kwargs)
        finally:
            self._prepared.update(prepared_graphs() - before)
        own = {id(tensor) for _, tensor in slots(self._copy)}
        made = list(self._prepared)
        for refusal in (graph.refusal for graph in made if graph.refusal is not None):
            raise OptionError(f"Nothing can be discarded, since {refusal}; freeze the model without discarding.")
        for graph in made:
            if graph.is_prepared:  # others served refused weights or other sizes, in earlier first calls
                _discard(graph, own, self._copy, self._model)
        self._copy.may_run_eagerly = False
        self._left = [(slot, tensor, type(tensor)) for slot, tensor in slots(self._model)]
        return result


def _copy_that_shares_tensors(model: torch.nn.Module) -> torch.nn.Module:
    kept = [tensor for _, tensor in slots(model)]
    # Tensors that are neither, such as a pruned weight, which torch cannot copy.
    kept += [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})
    except DiscardedError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise OptionError(
            f"discard_parameters compiles a copy of the model, and {type(model).__name__} cannot be copied ({reason});"
            " freeze it without discarding."
        ) from error


def _discard(graph: PreparedGraph, own: set[int], inner: torch.nn.Module, outer: torch.nn.Module) -> None:
    """Let ``graph`` and ``inner`` have tensors without memory, and ``outer``, the user's model, such that raise."""
    weights = {id(weight): weight for weight in graph.only_prepared() if id(weight) in own}
    standing = {key: without_memory(weight) for key, weight in weights.items()}
    graph.discard(standing)
    _replace(inner, weights, standing)
    _replace(outer, weights, {key: discarded(weight) for key, weight in weights.items()})


def _replace(
    model: torch.nn.Module, weights: Mapping[int, torch.Tensor], made: Mapping[int, torch.Tensor]
) -> None:
    for (tensors, name), tensor in list(slots(model)):
        if id(tensor) in weights:
            tensors[name] = made[id(tensor)]
