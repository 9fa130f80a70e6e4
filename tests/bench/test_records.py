"""Figures on disk: what is written is read again, damaged lines cost only themselves, and what counts as current."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from pathlib import Path

import pytest

from tests.bench.made_up import figures, record
from torchkiln.bench.cells import Cell, Job, Precision, Shapes
from torchkiln.bench.load import Load
from torchkiln.bench.records import Figures, append, is_current, new_record, percent, read, uncertainty

CELL = Cell("mlp-64", Job.training, Precision.bfloat16, Shapes.dynamic)


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way.jsonl"
    first = record("mish", {"eager": figures(2.0, difference=0.0), "kiln": Figures(failure="ended with code 1: x")})
    ours = figures(1.0, externs={"aten.mm.default": 3}, launches=4, fallbacks=("why",), slower=("training: 2 ms",))
    second = record("rope", {"kiln": ours}, load=Load(1.5, 0.25))
    append(path, first)
    append(path, second)
    assert read(path) == [first, second]


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "nothing.jsonl") == []


def test_the_last_record_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    old, new = record("mish", {"eager": figures(2.0)}), record("mish", {"eager": figures(3.0)})
    for one in (old, record("rope", {"eager": figures(1.0)}), new):
        append(path, one)
    assert [(r.cell.entry, r.figures["eager"].ms) for r in read(path)] == [("mish", 3.0), ("rope", 1.0)]


@pytest.mark.parametrize(
    "damaged",
    ["", "{", "[]", "3", "null", '{"cell": null}', '{"cell": {"entry": "mish"}}', "\ufeff{}"],
)
def test_lines_that_are_no_records_are_left_out(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "bench.jsonl"
    kept = record("mish", {"eager": figures(2.0)})
    append(path, kept)
    with path.open("a") as file:
        file.write(damaged + "\n")
    later = record("rope", {"eager": figures(2.0)})
    append(path, later)
    assert read(path) == [kept, later]


def test_a_line_cut_short_by_a_crash_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    kept = record("mish", {"eager": figures(2.0)})
    append(path, kept)
    append(path, record("rope", {"eager": figures(2.0)}))
    path.write_text(path.read_text()[:-20])
    again = record("rope", {"eager": figures(4.0)})
    append(path, again)
    assert read(path) == [kept, again]


def test_values_of_another_kind_make_a_line_no_record(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    append(path, record("mish", {"eager": figures(2.0)}))
    whole = json.loads(path.read_text())
    for name, value in (("cell", {**whole["cell"], "job": "dreaming"}), ("figures", {"eager": {"unknown": 1}})):
        path.write_text(json.dumps({**whole, name: value}) + "\n")
        assert read(path) == []


def test_a_record_is_current_for_what_it_was_taken_with() -> None:
    taken = new_record(CELL, {"eager": figures(2.0), "kiln": figures(1.0)}, 2, "kiln bench", 0.1, Load(0.5, 0.25))
    assert taken.load == Load(0.5, 0.25)
    assert taken.command == "kiln bench"
    assert is_current(taken, ["eager"], threads=2, rounds=3, seconds=0.1)
    assert is_current(taken, ["kiln", "eager"], threads=2, rounds=3, seconds=0.1)
    assert not is_current(taken, ["kiln", "eager", "inductor"], threads=2, rounds=3, seconds=0.1)
    assert not is_current(taken, ["eager"], threads=1, rounds=3, seconds=0.1)
    assert not is_current(taken, ["eager"], threads=2, rounds=4, seconds=0.1)
    assert not is_current(taken, ["eager"], threads=2, rounds=3, seconds=0.2)
    for change in ({"source": "other"}, {"machine": "other"}, {"versions": {"torch": "1.0"}}):
        assert not is_current(dataclasses.replace(taken, **change), ["eager"], threads=2, rounds=3, seconds=0.1)


def test_a_failure_on_record_is_current_without_rounds() -> None:
    taken = new_record(CELL, {"kiln": Figures(failure="took more than 900 s")}, 2, "", 0.1, Load())
    assert is_current(taken, ["kiln"], threads=2, rounds=7, seconds=0.1)


def test_a_record_that_says_nothing_is_not_current() -> None:
    wild = dataclasses.replace(figures(1.0), rounds=(1.0, 1.0, 448.0))
    taken = new_record(CELL, {"eager": figures(2.0), "kiln": wild}, 2, "", 0.1, Load())
    assert is_current(taken, ["eager"], threads=2, rounds=3, seconds=0.1)
    assert not is_current(taken, ["eager", "kiln"], threads=2, rounds=3, seconds=0.1)


def test_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert Figures(ms=10.0, rounds=(10.0, 8.0, 9.0, 14.0, 13.0, 7.0, 10.0)).spread == pytest.approx((13 - 8) / 2 / 10)
    assert Figures(ms=10.0, rounds=(10.0,)).spread == math.inf
    assert percent(math.inf) == "unknown"


@pytest.mark.parametrize("number", range(2, 40))
def test_spread_and_standard_error_are_of_the_same_quartiles(number: int) -> None:
    drawn = random.Random(number)
    rounds = tuple(drawn.uniform(5.0, 15.0) for _ in range(number))
    low, middle, high = statistics.quantiles(rounds, n=4)
    assert Figures(ms=middle, rounds=rounds).spread == pytest.approx((high - low) / 2 / middle)
    assert uncertainty(rounds) == pytest.approx(1.25 * (high - low) / 1.35 / math.sqrt(number) / middle)


def test_figures_whose_rounds_differ_too_much_say_nothing_and_have_no_speedup() -> None:
    # Of five, one that is far off is seen.
    wild = dataclasses.replace(figures(2.0), rounds=(2.0, 2.0, 2.0, 2.0, 900.0))
    one = record("mish", {"eager": wild, "kiln": figures(1.0), "inductor": figures(2.0)})
    assert not wild.is_reliable
    assert one.speedup("kiln", "eager") is None
    assert one.best_speedup("kiln", "eager") is None
    assert one.speedup("kiln", "inductor") == 2.0
    assert one.left_out() == ["eager"]
    assert not Figures(failure="ended").is_reliable
    assert record("mish", {"kiln": Figures(failure="ended")}).left_out() == []


def test_a_record_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    kept = record("mish", {"eager": figures(2.0)})
    line = json.loads(json.dumps(dataclasses.asdict(kept)))
    del line["load"]
    path.write_text(json.dumps(line) + "\n")
    assert read(path) == [kept]
    assert read(path)[0].load == Load()


def test_speedup_is_none_where_one_of_the_two_failed_or_is_not_there() -> None:
    one = record("mish", {"eager": figures(3.0), "kiln": figures(2.0), "inductor": Figures(failure="no compiler")})
    assert one.speedup("kiln", "eager") == pytest.approx(1.5)
    assert one.speedup("eager", "kiln") == pytest.approx(2 / 3)
    assert one.speedup("kiln", "inductor") is None
    assert one.speedup("kiln", "openvino") is None
