"""Tracing the functions of a rewrite into graphs like those that compiling makes.

A pattern only matches if it looks like the graphs it is matched against, so functions go the way of the user's
program: through AOTAutograd, with the same decompositions, and through the passes that come before any rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from torchkiln.frontend.aot import trace_with_autograd
from torchkiln.frontend.decompositions import decompositions
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect

Function = Callable[..., Any]


@dataclass(frozen=True)
class Traced:
    """A function as a graph. ``arguments`` are the names of its inputs in order; ``tangents_1`` and so on come last."""

    graph_module: torch.fx.GraphModule
    arguments: tuple[str, ...]


Tracer = Callable[[Function, Sequence[str], Sequence[Any]], Traced]


def fwd_only(function: Function, names: Sequence[str], values: Sequence[Any]) -> Traced:
    """``function`` as inference computes it. ``values`` are tensors, which become inputs, and numbers, which do not."""
    return _trace(function, names, values, training=False)


def joint_fwd_bwd(function: Function, names: Sequence[str], values: Sequence[Any]) -> Traced:
    """``function`` and the gradients of its results with respect to the ``values`` that ask for them, as one graph."""
    return _trace(function, names, values, training=True)


def _trace(function: Function, names: Sequence[str], values: Sequence[Any], *, training: bool) -> Traced:
    mode = detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)
    tensors = [(name, value) for name, value in zip(names, values, strict=True) if isinstance(value, torch.Tensor)]
    fixed = {n: v for n, v in zip(names, values, strict=True) if not isinstance(v, torch.Tensor)}
    with torch.enable_grad():
        inputs = [_fresh(mode, value, grad=training and value.requires_grad) for _, value in tensors]
    captured: list[torch.fx.GraphModule] = []

    def forward(*given: torch.Tensor) -> Any:
        arguments = {**fixed, **dict(zip((name for name, _ in tensors), given, strict=True))}
        results = function(*(arguments[name] for name in names))
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    module = torch.nn.Module()
    module.forward = forward

    def take(graph_module: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        captured.append(graph_module)
        raise _Done

    with tracing(TracingContext(mode)), torch.set_grad_enabled(training), suppress(_Done):
        trace_with_autograd(
            module,  # type: ignore[arg-type]
            inputs,
            forward_compiler=take,
            backward_compiler=take,
            inference_compiler=take,
            partition=take,
            decompositions=decompositions(),
        )
    (graph_module,) = captured
    normalize(graph_module)
    tangents = len(graph_module.graph.find_nodes(op="placeholder")) - len(tensors)
    return Traced(graph_module, (*(n for n, _ in tensors), *(f"tangents_{k + 1}" for k in range(tangents))))


def normalize(graph_module: torch.fx.GraphModule) -> None:
    """What the user's graphs go through before the first rewrite."""
    from torchkiln.passes.joint import NORMAL_FORM  # its tuple names passes that are made of rewrites

    for item in NORMAL_FORM:
        item.run(graph_module)
    eliminate_dead_code(graph_module.graph, has_effect)


def _fresh(mode: FakeTensorMode, value: torch.Tensor, *, grad: bool) -> torch.Tensor:
    """A leaf like ``value``, without memory."""
    with mode:
        return torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=value.device, requires_grad=grad
        )


class _Done(Exception):
    """The graph is there and nothing is left to do."""
