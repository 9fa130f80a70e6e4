"""Random programs, forward and backward, with fixed and symbolic sizes, whose kernels are those of a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.codegen.llvm.gpu.on_threads import HOPPER, PlanOnThreads, plan_of_graph
from tests.programs.check import Different, check
from tests.programs.generate import programs
from tests.programs.program import Program
from torchkiln.compiler import compile_fx
from torchkiln.config import Settings
from torchkiln.graph.fake import outside_tracing
from torchkiln.graph.manager import PassManager
from torchkiln.graph.subgraphs import copy_graph_module
from torchkiln.passes.post_grad import POST_GRAD
from torchkiln.schedule import gpu


class EmulatingCompiler:
    """Stands in for ``compile_fx_inner``; ``launches`` counts the kernels of the graphs it was given."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any], **facts: Any) -> Callable[..., Any]:
        kind = "backward" if facts.get("is_backward") else "inference" if facts.get("is_inference") else "forward"
        optimized = copy_graph_module(gm)
        with outside_tracing():
            PassManager(facts["settings"], HOPPER).run(POST_GRAD, optimized, kind=kind)
            run = PlanOnThreads(plan_of_graph(optimized, kind=kind, settings=facts["settings"]))
        self.launches += len(run.plan.steps)

        def call(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return run(values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def emulated(program: Program, inner: EmulatingCompiler) -> Callable[..., Any]:
    """A backend for ``torch.compile``."""
    given_settings = Settings(fallback=False, precision=program.precision)
    return lambda gm, inputs: compile_fx(gm, inputs, inner_compile=inner, settings=given_settings)


@pytest.mark.parametrize(("block", "busy"), [(0, 1 << 17), (1, 16)])
def test_random_programs_give_what_they_give_in_eager(block: int, busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that ``busy`` threads fill."""
    monkeypatch.setattr(gpu, "_BUSY", busy)
    verdicts: Counter[str] = Counter()
    failures: list[str] = []
    inner = EmulatingCompiler()

    def one(program: Program | None) -> None:
        if program is None:
            return
        try:
            verdicts[check(program, emulated(program, inner))] += 1
        except Different as different:
            failures.append(str(different))

    within = settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck))  # fmt: skip
    seed(2_000_000 + block)(within(given(programs())(one)))()
    assert not failures, "\n\n".join(failures)
    assert verdicts["same"] > 15, verdicts
    assert inner.launches > 50
