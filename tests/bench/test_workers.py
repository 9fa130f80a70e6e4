"""Processes of a cell: the protocol they speak, and that one that fails or dies stops none of the others."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from torchkiln.bench import command, interleave
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.interleave import Effort, Worker, WorkerFailed, measure
from torchkiln.bench.records import Figures, read, uncertainty

CELL = Cell("mlp-64", Job.inference, Precision.float32, Shapes.static)
TRAINING = Cell("mlp-64", Job.training, Precision.float32, Shapes.dynamic)
SHORT = Effort(rounds=2, plenty=2, seconds=0.01, patience=0.0, limit=120.0)


def test_a_worker_answers_each_order(tmp_path: Path) -> None:
    worker = Worker(TRAINING, "kiln", 1, tmp_path, limit=120.0)
    try:
        assert worker.answer()["ready"]
        first, seen_mib = worker.first_call()
        assert first["seconds"] > 0
        assert seen_mib == 0  # we start no process
        answer = worker.ask("round", seconds=0.01)
        assert answer["ms"] > 0
        assert answer["steps"] >= 3
        memory = worker.ask("memory")
        assert memory["peak"] >= memory["steps"] > 10
        checked = worker.ask("check")
        assert checked["graphs"] == 2
        assert checked["launches"] > 0
        assert sum(checked["externs"].values()) > 0
        assert checked["fallbacks"] == []
        with pytest.raises(WorkerFailed, match="KeyError: 'dance'"):
            worker.ask("dance")
        assert worker.ask("round", seconds=0.01)["ms"] > 0
    finally:
        worker.close()


def test_one_that_fails_or_dies_yields_a_failure_and_the_rest_go_on() -> None:
    said: list[str] = []
    found = measure(CELL, ["eager", "no-such-backend", "kiln"], SHORT, 1, said.append)
    assert found["no-such-backend"] == Figures(failure="ended with code 1: KeyError: 'no-such-backend'")
    for name in ("eager", "kiln"):
        assert not found[name].failure
        assert len(found[name].rounds) == 2
        assert found[name].ms > 0
        assert found[name].difference is not None
        assert found[name].difference < 1e-5
    assert found["kiln"].launches > 0
    assert found["eager"].launches == 0
    assert any(text.endswith("round 2") for text in said)


class Scripted:
    """Stands for a worker; the script says at which order each backend fails."""

    script: ClassVar[dict[str, str]] = {}
    orders: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, cell: Cell, backend: str, threads: int, caches: Path, limit: float) -> None:
        self.backend = backend

    def answer(self) -> dict[str, Any]:
        return self.ask("start")

    def ask(self, do: str, **given: object) -> dict[str, Any]:
        self.orders.append((self.backend, do))
        if self.script.get(self.backend) == do:
            raise WorkerFailed(f"failed at {do}")
        figures = {"seconds": 2.0, "ms": float(len(self.orders)), "peak": 3.0, "steps": 2.0}
        return {**figures, "difference": 0.0, "externs": {}, "launches": 1, "fallbacks": [], "slower": []}

    def first_call(self) -> tuple[dict[str, Any], float]:
        return self.ask("first"), 4.0

    def close(self) -> None:
        self.orders.append((self.backend, "close"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(interleave, "Worker", Scripted)
    monkeypatch.setattr(Scripted, "script", {})
    monkeypatch.setattr(Scripted, "orders", [])
    return Scripted


@pytest.mark.parametrize("order", ["start", "first", "round", "memory", "check"])
def test_wherever_a_backend_fails_the_others_finish_and_all_are_closed(scripted: type[Scripted], order: str) -> None:
    scripted.script["b"] = order
    found = measure(CELL, ["a", "b", "c"], SHORT, 1, lambda text: None)
    assert found["b"] == Figures(failure=f"failed at {order}")
    assert [found[name].failure for name in ("a", "c")] == ["", ""]
    assert {name for name, do in scripted.orders if do == "close"} == {"a", "b", "c"}


def test_the_peak_is_what_was_seen_of_all_processes_or_that_of_the_process_if_it_is_more(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure(CELL, ["a"], SHORT, 1, lambda text: None)["a"]
    assert (found.peak_mib, found.process_mib, found.step_mib) == (4.0, 3.0, 2.0)
    monkeypatch.setattr(Scripted, "first_call", lambda self: (self.ask("first"), 1.0))
    found = measure(CELL, ["a"], SHORT, 1, lambda text: None)["a"]
    assert (found.peak_mib, found.process_mib) == (3.0, 3.0)


def test_rounds_are_interleaved_and_every_other_one_goes_the_other_way(scripted: type[Scripted]) -> None:
    measure(CELL, ["a", "b"], SHORT, 1, lambda text: None)
    assert [name for name, do in scripted.orders if do == "round"] == ["a", "b", "b", "a"]


def test_slow_steps_have_the_least_rounds_and_fast_ones_the_most(scripted: type[Scripted]) -> None:
    slow = measure(CELL, ["a"], Effort(rounds=3, plenty=9, together=0.0, patience=0.0), 1, lambda text: None)
    fast = measure(CELL, ["a"], Effort(rounds=3, plenty=9, together=60.0, patience=0.0), 1, lambda text: None)
    assert len(slow["a"].rounds) == 3
    assert len(fast["a"].rounds) == 9


def test_rounds_go_on_for_a_while_where_they_differ_much() -> None:
    effort = Effort(rounds=3, plenty=9, together=12.0, certain=0.03, patience=24.0)
    steady, wild = [1.0, 1.01, 0.99] * 3, [1.0, 1.5, 2.0] * 3
    assert not effort.is_enough([steady[:3]], 5.0)
    assert effort.is_enough([steady, steady], 5.0)
    assert effort.is_enough([steady[:4]], 12.5)
    assert not effort.is_enough([steady, wild], 12.5)
    assert effort.is_enough([steady, wild], 24.5)
    assert not effort.is_enough([steady[:2]], 24.5)
    assert effort.is_enough([], 0.0)  # nobody is left


def test_the_uncertainty_of_a_median_is_that_of_medians_drawn_again_and_again() -> None:
    drawn = random.Random(0)
    samples = [[drawn.gauss(10.0, 1.0) for _ in range(31)] for _ in range(2000)]
    seen = statistics.stdev(statistics.median(sample) for sample in samples) / 10.0
    told = statistics.mean(uncertainty(sample) for sample in samples)
    assert told == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize("rounds", [[], [1.0], [0.0] * 5])
def test_rounds_that_tell_nothing_are_uncertain(rounds: list[float]) -> None:
    assert uncertainty(rounds) == math.inf
    assert not Effort(rounds=0, plenty=0).is_enough([rounds], 1.0)
    assert Effort(rounds=0, plenty=0).is_enough([rounds], 25.0)


def test_a_worker_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    worker = Worker(CELL, "eager", 1, tmp_path, limit=0.01)
    try:
        with pytest.raises(WorkerFailed, match=r"took more than 0\.01 s"):
            worker.answer()
    finally:
        worker.close()


def test_a_run_resumes_with_what_is_not_on_record(scripted: type[Scripted], tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    console = Console(quiet=True)
    asked = command.request("mlp-64", "eager,kiln", "inference", "float32", "static", quick=True, threads=1)
    first = command.run(asked, path, resume=True, console=console, command="kiln bench --quick")
    assert [record.command for record in first] == ["kiln bench --quick"]
    assert scripted.orders
    scripted.orders.clear()
    wider = command.request("mlp-64", "eager,kiln", "inference,training", "float32", "static", quick=True, threads=1)
    second = command.run(wider, path, resume=True, console=console)
    assert second[0] == first[0]
    assert [str(record.cell) for record in second[1:]] == ["mlp-64 training float32 static"]
    assert [record.cell for record in read(path)] == [record.cell for record in second]
    scripted.orders.clear()
    command.run(wider, path, resume=True, console=console)
    assert scripted.orders == []
    command.run(wider, path, resume=False, console=console)
    assert scripted.orders
