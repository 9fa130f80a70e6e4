"""Run-time code that Dynamo leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import counters

from tests.runtime.hand_made import HandMade


def frames_and_gradient(hook: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, torch.Tensor | None]:
    """How many frames Dynamo looks at in a function whose backward calls ``hook``, and what the backward gives."""
    # The code of AOTAutograd, which normally calls a graph, is skipped like this: itself, not what it calls.
    skip_code(hook.__code__)
    y = torch.zeros(3, requires_grad=True)
    y.register_hook(hook)
    total = y.sum()

    def step() -> None:
        total.backward()

    torch._dynamo.reset()
    before = counters["frames"]["total"]
    torch.compile(step, backend="eager")()
    return counters["frames"]["total"] - before, y.grad


def test_dynamo_does_not_trace_a_graph_that_runs_while_it_watches() -> None:
    x = torch.randn(3)
    graph = HandMade()
    graph.input("x", x)
    graph.own("sum", x)
    graph.own("soft", x)
    graph.launch("add", "x", "x", "sum")
    graph.extern(torch.ops.aten.softplus.default, ("sum",), ("soft",))  # through Python
    graph.output("soft")
    compiled = graph.build()

    def through_graph(gradient: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = compiled([gradient.contiguous()])[0]
        return result

    frames_without, _ = frames_and_gradient(lambda gradient: gradient)
    frames, gradient = frames_and_gradient(through_graph)
    assert frames <= frames_without
    torch.testing.assert_close(gradient, torch.nn.functional.softplus(torch.full((3,), 2.0)))
