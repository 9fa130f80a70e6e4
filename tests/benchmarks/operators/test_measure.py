"""A few cells as they are measured: kiln's results and gradients are eager's, and a wrong result is seen."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from benchmarks.operators.cells import Cell, Job
from benchmarks.operators.entries import entry_of
from benchmarks.operators.entry import Call
from benchmarks.operators.layouts import Layout
from benchmarks.operators.measure import Effort, _Step, interleaved, measure
from conformance.cases import seed_everything
from torchkiln.bench.backends import Backend

QUICK = Effort(rounds=2, seconds=0.0, shortest=0.0, longest=60.0)
BOTH = ("eager", "kiln")


def _measured(call: Call, job: Job, layout: Layout = Layout.contiguous, dtype: str = "float32") -> dict[str, Any]:
    return measure(call, Cell("", layout, dtype, job, 1), BOTH, QUICK)


@pytest.mark.parametrize(("dtype", "job"), [("float32", Job.forward), ("bfloat16", Job.backward)])
@pytest.mark.parametrize(
    ("entry", "layout"),
    [
        ("product of halves", Layout.rows),
        ("flip of columns", Layout.transposed),
        ("layer norm", Layout.every_second),
        ("cat of transposed", Layout.contiguous),
        ("reflect pad", Layout.channels_last),
        ("group norm", Layout.permuted),
    ],
)
def test_results_and_gradients_of_cells_are_those_of_eager(entry: str, layout: Layout, dtype: str, job: Job) -> None:
    seed_everything(0)
    found = _measured(entry_of(entry).make(getattr(torch, dtype)), job, layout, dtype)
    assert found["wrong"] == ""
    assert [len(found["figures"][name]["rounds"]) for name in BOTH] == [2, 2]
    assert not found["figures"]["kiln"]["failure"]
    assert found["overhead_us"] > 0


def test_a_result_or_gradient_that_is_not_eagers_is_seen() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    for job in Job:
        step = _Step(Call(torch.sin, (x,)), job)
        step.judge("right", step.run(lambda x: torch.sin(x)))
        step.judge("wrong", step.run(lambda x: torch.sin(x) * 1.01))
        assert list(step.wrong) == ["wrong"]


def test_extern_calls_are_counted() -> None:
    found = _measured(Call(torch.mm, (torch.randn(64, 64), torch.randn(64, 64))), Job.forward)
    assert sum(found["figures"]["kiln"]["externs"].values()) == 1


def test_what_ours_fails_at_is_a_failure_and_eager_is_still_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object, dynamic: bool) -> NoReturn:
        raise ValueError("not like this")

    monkeypatch.setattr("benchmarks.operators.measure.BACKENDS", {"kiln": Backend("kiln", fail)})
    found = _measured(Call(torch.relu, (torch.randn(8),)), Job.forward)["figures"]
    assert found["kiln"]["failure"] == "ValueError: not like this"
    assert len(found["eager"]["rounds"]) == 2


@pytest.mark.parametrize(
    ("call", "job", "reason"),
    [
        (Call(torch.relu, (torch.randn(8),)), Job.backward, "no input has a gradient"),
        (Call(torch.argmax, (torch.randn(8, requires_grad=True),)), Job.backward, "no result has a gradient"),
        (Call(torch.mm, (torch.randn(8, 9), torch.randn(8, 9))), Job.forward, "eager fails: mat1 and mat2"),
    ],
)
def test_a_cell_that_says_nothing_is_left_out(call: Call, job: Job, reason: str) -> None:
    assert _measured(call, job)["left_out"].startswith(reason)


def test_calls_too_short_for_anything_but_overhead_are_left_out() -> None:
    call = Call(torch.relu, (torch.randn(8),))
    found = measure(call, Cell("", Layout.contiguous, "float32", Job.forward, 1), BOTH, Effort(shortest=10.0))
    assert found["left_out"].startswith("eager takes")


def test_rounds_take_turns_in_an_order_that_changes() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    now = iter(range(1000))
    times = interleaved(steps, Effort(rounds=3, seconds=0.0), lambda: float(next(now)))
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert order[-6:] == ["a", "b", "b", "a", "a", "b"]
