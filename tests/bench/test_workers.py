"""Processes of a cell: the protocol they speak, and that one that fails or dies stops none of the others."""

from __future__ import annotations

import io
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from torchkiln.bench import command, interleave
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.interleave import Effort, Worker, WorkerFailed, measure
from torchkiln.bench.records import LARGEST_ERROR, Figures, read, uncertainty

CELL = Cell("mlp-64", Job.inference, Precision.float32, Shapes.static)
TRAINING = Cell("mlp-64", Job.training, Precision.float32, Shapes.dynamic)
SHORT = Effort(rounds=2, plenty=2, seconds=0.01, patience=0.0, utmost=0.0, limit=120.0)


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
    measured = measure(CELL, ["eager", "no-such-backend", "kiln"], SHORT, 1, said.append)
    found = measured.figures
    assert measured.load.others is not None
    assert 0 <= measured.load.others <= 1
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
    found = measure(CELL, ["a", "b", "c"], SHORT, 1, lambda text: None).figures
    assert found["b"] == Figures(failure=f"failed at {order}")
    assert [found[name].failure for name in ("a", "c")] == ["", ""]
    assert {name for name, do in scripted.orders if do == "close"} == {"a", "b", "c"}


def test_the_peak_is_what_was_seen_of_all_processes_or_that_of_the_process_if_it_is_more(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure(CELL, ["a"], SHORT, 1, lambda text: None).figures["a"]
    assert (found.peak_mib, found.process_mib, found.step_mib) == (4.0, 3.0, 2.0)
    monkeypatch.setattr(Scripted, "first_call", lambda self: (self.ask("first"), 1.0))
    found = measure(CELL, ["a"], SHORT, 1, lambda text: None).figures["a"]
    assert (found.peak_mib, found.process_mib) == (3.0, 3.0)


def test_rounds_are_interleaved_and_every_other_one_goes_the_other_way(scripted: type[Scripted]) -> None:
    measure(CELL, ["a", "b"], SHORT, 1, lambda text: None)
    assert [name for name, do in scripted.orders if do == "round"] == ["a", "b", "b", "a"]


def test_slow_steps_have_the_least_rounds_and_fast_ones_the_most(scripted: type[Scripted]) -> None:
    slow, fast = (
        measure(
            CELL,
            ["a"],
            Effort(rounds=3, plenty=9, together=together, patience=0.0, utmost=0.0),
            1,
            lambda text: None,
        ).figures["a"]
        for together in (0.0, 60.0)
    )
    assert len(slow.rounds) == 3
    assert len(fast.rounds) == 9


def test_rounds_go_on_for_a_while_where_they_differ_much() -> None:
    effort = Effort(rounds=3, plenty=9, together=12.0, certain=0.03, patience=24.0, utmost=96.0)
    steady, wild = [1.0, 1.01, 0.99] * 3, [1.0, 1.5, 2.0] * 3
    assert not effort.is_enough([steady[:3]], 5.0)
    assert effort.is_enough([steady, steady], 5.0)
    assert effort.is_enough([steady[:4]], 12.5)
    assert not effort.is_enough([steady, wild], 12.5)
    assert effort.is_enough([steady, wild], 24.5)
    assert not effort.is_enough([steady[:2]], 24.5)
    assert effort.is_enough([], 0.0)  # nobody is left


def test_rounds_go_on_for_longer_where_one_says_nothing_and_then_end() -> None:
    effort = Effort(rounds=3, plenty=9, together=12.0, certain=0.03, patience=24.0, utmost=96.0)
    steady, nonsense = [1.0, 1.01, 0.99] * 3, [1.0, 1.0, 400.0] * 3
    assert uncertainty(nonsense) > LARGEST_ERROR
    assert not effort.is_enough([steady, nonsense], 24.5)
    assert effort.is_enough([steady, [*nonsense, *[1.0] * 200]], 5.0), "what was disturbed at first need not stay so"
    assert effort.is_enough([steady, nonsense], 96.5)


def test_progress_shows_the_spread_of_each_backend(scripted: type[Scripted]) -> None:
    said: list[str] = []
    effort = Effort(rounds=4, plenty=4, together=60.0, patience=0.0, utmost=0.0)
    measure(CELL, ["a", "b"], effort, 1, said.append)
    rounds = [text for text in said if "round" in text]
    assert rounds[:2] == ["mlp-64 inference float32 static: round 1", "mlp-64 inference float32 static: round 2"]
    # Orders are numbered, and a round's time is its number: a has the rounds 5, 8 and 9, b 6, 7 and 10.
    assert rounds[3].endswith(f"round 4 (a ± {2 / 8:.0%}, b ± {2 / 7:.0%})")


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
    assert not Effort(rounds=0, plenty=0).is_enough([rounds], 25.0)
    assert Effort(rounds=0, plenty=0).is_enough([rounds], 97.0)


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


def test_a_cell_that_says_nothing_is_measured_again_by_a_run_that_resumes(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "QUICK", Effort(rounds=3, plenty=3, seconds=0.0, patience=0.0, utmost=0.0))
    asked = command.request("mlp-64", "eager,kiln", "inference", "float32", "static", quick=True, threads=1)
    path = tmp_path / "bench.jsonl"
    console = Console(file=io.StringIO(), width=20)
    answer = Scripted.ask

    def wild(self: Scripted, do: str, **given: object) -> dict[str, Any]:
        found = answer(self, do, **given)
        return {**found, "ms": 10.0 ** (found["ms"] / 2)} if self.backend == "kiln" else {**found, "ms": 1.0}

    monkeypatch.setattr(Scripted, "ask", wild)
    (record,) = command.run(asked, path, resume=True, console=console)
    assert record.left_out() == ["kiln"]
    (line,) = (text for text in console.file.getvalue().splitlines() if "eager" in text)  # type: ignore[attr-defined]
    assert re.search(r"eager 1\.000 ms ± 0% \(first 2\.00 s\), kiln .* ms ± \d{3,}% \(first", line)
    assert re.search(r"; left out for their spread: kiln; others took \d+%, load average", line)
    scripted.orders.clear()
    monkeypatch.setattr(Scripted, "ask", lambda self, do, **given: {**answer(self, do, **given), "ms": 1.0})
    (record,) = command.run(asked, path, resume=True, console=console)
    assert record.left_out() == []
    assert scripted.orders
    scripted.orders.clear()
    command.run(asked, path, resume=True, console=console)
    assert not scripted.orders
