"""Frozen models and frozen graphs: inference with weights that stay, folded and prepared once.

Every inference prepares its weights and guards them (:mod:`torchkiln.runtime.prepared_weights`). Freezing is for those
who want more: a refusal of training, the original weights discarded, or a graph with its weights as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.fx

from torchkiln.errors import OptionError
from torchkiln.freezing.graphs import freeze_graph
from torchkiln.freezing.models import freeze_model


@overload
def freeze(
    model: torch.nn.Module, *, discard_parameters: bool = False, options: dict[str, Any] | None = None
) -> Callable[..., Any]: ...
@overload
def freeze(
    model: torch.fx.GraphModule,
    aot_graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    discard_parameters: bool = False,
) -> tuple[torch.fx.GraphModule, list[int]]: ...
def freeze(
    model: torch.nn.Module,
    aot_graph: torch.fx.GraphModule | None = None,
    example_inputs: Sequence[Any] | None = None,
    *,
    discard_parameters: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """A model compiled for inference, as a function that is called as the model is.

    It refuses calls that would record gradients, and models in training mode that have a batch norm or a dropout.
    ``options`` are settings by name. A weight that changes is prepared again at the next call. With
    ``discard_parameters``, the first call drops the model's own weights that are not read as they are: the memory of a
    model is then that of its prepared weights, the model itself is of no more use, and a later change of a weight
    raises :class:`~torchkiln.errors.DiscardedError`, as does any use of the model.

    With a graph that Dynamo captured, the functional graph that AOTAutograd made of it, and the inputs of that graph:
    the functional graph with weights as attributes, what depends on weights alone computed, and the positions of the
    inputs that it still takes. Inputs are weights where they are parameters or buffers of the captured graph, or where
    AOTAutograd says so while it compiles. Neither graph is changed; with ``discard_parameters`` the captured one loses
    its parameters and buffers.
    """
    if aot_graph is None:
        if example_inputs is not None:
            raise OptionError("freeze(model) takes no inputs; freeze(captured, functional, inputs) takes two graphs.")
        return freeze_model(model, options or {}, discard=discard_parameters)
    if example_inputs is None or options is not None:
        raise OptionError("freeze(captured, functional, inputs) takes the functional graph's inputs, and no options.")
    return freeze_graph(model, aot_graph, example_inputs, discard=discard_parameters)
