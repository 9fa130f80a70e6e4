"""The joint graphs of one call of a model, taken on the way that ``torch.compile(backend="kiln")`` goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves

from torchkiln.compiler import compile_fx
from torchkiln.config import Settings
from torchkiln.errors import KilnError
from torchkiln.frontend.aot import with_one_list
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.memory.saved import MakerLines, SavedMemory, saved_by
from torchkiln.memory.unchanged import copied_inputs, modules_of, state_kept
from torchkiln.partition import min_cut_rematerialization_partition


@dataclass(frozen=True)
class JointGraph:
    """A joint graph as the partition is given it; its first ``num_fwd_outputs`` results are those of forward."""

    module: torch.fx.GraphModule
    num_fwd_outputs: int


@dataclass(frozen=True)
class Captured:
    """``graphs`` in the order of the call, what eager keeps, and what the graphs keep that are split at budget 1."""

    graphs: tuple[JointGraph, ...]
    eager: SavedMemory
    compiled: SavedMemory


def capture(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings) -> Captured:
    """Call ``model`` twice with copies of the inputs, eagerly and through Dynamo and AOTAutograd, with gradients on.

    No code is generated and no backward runs. The state of the model and random numbers are afterwards as before.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    settings = replace(settings, fallback=False, memory_budget=1.0)
    graphs: list[JointGraph] = []

    def split(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **facts: Any) -> Any:
        graphs.append(JointGraph(copy_graph_module(joint), num_fwd_outputs))
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **facts)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_fx(gm, inputs, inner_compile=interpreted, split=split, settings=settings)

    eager = _measured(model, model, args, kwargs, MakerLines())
    try:
        compiled = _measured(model, torch.compile(calling(model), backend=backend, dynamic=False), args, kwargs)
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, KilnError):
            raise failure.inner_exception from None
        raise
    return Captured(tuple(graphs), eager, compiled)


def _measured(
    model: Callable[..., Any],
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    makers: MakerLines | None = None,
) -> SavedMemory:
    with state_kept(model), torch.inference_mode(False), torch.enable_grad():
        args, kwargs = copied_inputs((tuple(args), dict(kwargs)))
        others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for module in modules_of(model):
            others += [*module.parameters(), *module.buffers()]
        return saved_by(lambda: call(*args, **kwargs), others, makers)


def calling(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``model``, with code of its own.

    Dynamo keeps compiled code by code object. What is kept for a report would count against the number of
    recompilations of the user's own code otherwise.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code: CodeType = call.__code__.replace(co_name="call")
    return FunctionType(code, call.__globals__, "call", None, call.__closure__)


def interpreted(gm: torch.fx.GraphModule, _inputs: Sequence[Any], **_facts: Any) -> Callable[..., Any]:
    """In place of ``compile_fx_inner``: the functional graph itself, run node by node."""

    return with_one_list(lambda *values: torch.fx.Interpreter(gm).run(*values))
