"""An inner compiler that interprets functional graphs and keeps them, to test what comes before lowering alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from torchkiln.frontend.specialize import SpecializedGraphs, has_symbolic_inputs, specialize


class InterpretingCompiler:
    """Stands in for ``compile_fx_inner``; ``graphs`` are the functional graphs it was given, in order."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.calls: list[dict[str, Any]] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **facts: Any) -> Callable[..., Any]:
        self.calls.append(facts)
        if has_symbolic_inputs(gm):
            return SpecializedGraphs(gm, lambda graph, arguments: self._interpret(specialize(graph, arguments)))
        return self._interpret(gm)

    def _interpret(self, gm: torch.fx.GraphModule) -> Callable[..., Any]:
        self.graphs.append(gm)

        def call(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return torch.fx.Interpreter(gm).run(*values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def targets(gm: torch.fx.GraphModule) -> list[Any]:
    """What the graph calls, in order."""
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]
