"""Figures on disk, and which of them need not be taken again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operators import campaign, records
from benchmarks.operators.measure import Effort
from benchmarks.operators.records import Record, counts, new_record, read
from tests.benchmarks.operators.made_up import answer, cell, record
from torchkiln.bench.load import Load
from torchkiln.bench.records import append

BOTH = ("eager", "kiln")


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = record("relu", eager=(100.0, 110.0), kiln=(50.0, 55.0))
    second = new_record(cell("flip"), {"left_out": "no input has a gradient"}, "", Effort(), Load())
    append(path, first)
    append(path, second)
    with path.open("a") as file:
        file.write('{"cell": {"entry":')
    assert read(path) == {first.cell: first, second.cell: second}


@pytest.mark.parametrize(
    "other",
    [
        {"source": "another"},
        {"benchmark": "another"},
        {"machine": "another"},
        {"versions": {"torch": "1.0"}},
        {"round_seconds": 1e-6},
    ],
)
def test_a_record_counts_for_the_same_sources_versions_machine_and_effort(other: dict[str, Any]) -> None:
    kept = record("relu", eager=(100.0, 110.0), kiln=(50.0, 55.0))
    assert counts(kept, BOTH, Effort())
    assert not counts(replace(kept, **other), BOTH, Effort())


def test_a_record_without_a_backend_that_is_asked_for_does_not_count() -> None:
    kept = record("relu", eager=(100.0, 110.0), kiln=(50.0, 55.0))
    assert not counts(kept, (*BOTH, "inductor"), Effort())
    left_out = new_record(cell(), {"left_out": "eager takes 3 µs"}, "", Effort(), Load())
    assert counts(left_out, (*BOTH, "inductor"), Effort())


class _Scripted:
    """Stands for the processes; keeps which cells it was asked for."""

    asked: list[str]

    def __init__(self, caches: Path, limit: float) -> None:
        _Scripted.asked = []

    def measure(self, cell: Any, backends: Any, effort: Any) -> dict[str, object]:
        _Scripted.asked.append(cell.entry)
        return answer(eager=(100.0, 110.0), kiln=(50.0, 55.0))

    def close(self) -> None:
        pass


@pytest.fixture
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "Workers", _Scripted)


def _run(path: Path, *entries: str, seconds: float = 60.0, again: bool = False) -> Iterator[tuple[Record, bool]]:
    return campaign.run(
        [cell(entry) for entry in entries],
        BOTH,
        Effort(),
        path=path,
        limit=1.0,
        end=time.monotonic() + seconds,
        again=again,
        command="",
    )


@pytest.mark.usefixtures("_scripted")
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    stopped = _run(path, "relu", "flip", "gelu")
    next(stopped)
    stopped.close()
    found = list(_run(path, "relu", "flip", "gelu"))
    assert [is_new for _, is_new in found] == [False, True, True]
    assert _Scripted.asked == ["flip", "gelu"]
    assert list(records.read(path).values()) == [record for record, _ in found]
    list(_run(path, "relu", again=True))
    assert _Scripted.asked == ["relu"]


@pytest.mark.usefixtures("_scripted")
def test_after_its_time_a_run_begins_no_cell_and_gives_those_on_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    list(_run(path, "flip"))
    assert [record.cell.entry for record, _ in _run(path, "relu", "flip", "gelu", seconds=-1.0)] == ["flip"]
    assert _Scripted.asked == []


def test_a_process_that_dies_is_a_failure_of_that_cell_and_the_next_is_measured(tmp_path: Path) -> None:
    workers = campaign.Workers(tmp_path, limit=60.0)
    try:
        quick = Effort(rounds=2, seconds=0.0, shortest=0.0)
        failed = workers.measure(cell("no such entry"), BOTH, quick)
        assert failed == {"left_out": "no entry is called no such entry"}
        assert workers._process is not None
        workers._process._process.kill()
        died = new_record(cell("relu"), workers.measure(cell("relu"), BOTH, quick), "", quick, Load())
        assert "ended" in died.failure
        assert not died.is_measured
        measured = new_record(cell("relu"), workers.measure(cell("relu"), BOTH, quick), "", quick, Load())
        assert measured.is_measured
        assert not measured.wrong
    finally:
        workers.close()
