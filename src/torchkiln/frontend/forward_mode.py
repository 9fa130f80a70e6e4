"""Forward-mode differentiation, traced: a graph on dual numbers as a graph of values and tangents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from torchkiln.errors import UnsupportedError
from torchkiln.graph.aliases import Aliases
from torchkiln.graph.dead_code import eliminate_dead_code
from torchkiln.graph.effects import has_effect


@dataclass(frozen=True)
class TangentGraph:
    """A function of inputs and tangents, as a graph.

    ``with_tangent`` says for each of the results whether it has a tangent; those follow the results.
    """

    graph_module: torch.fx.GraphModule
    with_tangent: tuple[bool, ...]


def trace_tangents(graph_module: torch.fx.GraphModule, primals: Sequence[Any], tangents: Sequence[Any]) -> TangentGraph:
    """The graph of ``graph_module`` on dual numbers; call it while a level of forward-mode differentiation is open.

    It takes ``primals``, then those of ``tangents`` that are not None. ``graph_module`` returns a flat tuple.
    """
    given = [k for k, tangent in enumerate(tangents) if tangent is not None]
    with_tangent: list[bool] = []

    def on_dual_numbers(*values: Any) -> list[Any]:
        inputs = list(values[: len(primals)])
        for position, tangent in zip(given, values[len(primals) :], strict=True):
            inputs[position] = forward_ad.make_dual(inputs[position], tangent)
        results: list[Any] = []
        found: list[Any] = []
        with_tangent.clear()
        for result in graph_module(*inputs):
            primal, tangent = forward_ad.unpack_dual(result) if isinstance(result, torch.Tensor) else (result, None)
            results.append(primal)
            with_tangent.append(tangent is not None)
            if tangent is not None:
                found.append(tangent)
        return [*results, *found]

    detached = [value.detach() if isinstance(value, torch.Tensor) else value for value in primals]
    arguments = [*detached, *(tangents[k].detach() for k in given)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # constants that derivatives of operators make
    fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments]
    traced = make_fx(on_dual_numbers)(*fakes)
    eliminate_dead_code(traced.graph, has_effect)  # tangents that are zero leave computations on no device behind
    traced.recompile()
    written = Aliases(traced.graph).written
    if any(node in written for node in traced.graph.find_nodes(op="placeholder")):
        raise UnsupportedError("forward-mode differentiation of a function that writes to its inputs")
    return TangentGraph(traced, tuple(with_tangent))
