"""The page of results: every target judged by hand-made records, losses as plain as wins, every cell there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.bench.made_up import figures, record
from torchkiln.bench.cells import Job
from torchkiln.bench.command import write
from torchkiln.bench.interleave import Effort
from torchkiln.bench.load import Load
from torchkiln.bench.page import page
from torchkiln.bench.records import LARGEST_ERROR, Figures, Record
from torchkiln.bench.targets import outcomes

WIN = {"eager": figures(8.0, 0.1, 100), "inductor": figures(4.0, 8.0, 200), "kiln": figures(1.0, 2.0, 50)}
LOSS = {"eager": figures(1.0, 0.1, 100), "inductor": figures(1.0, 8.0, 200), "kiln": figures(2.0, 4.0, 300)}
FAILED = {"eager": figures(5.0), "inductor": figures(5.0), "kiln": Figures(failure="took | more\nthan 900 s")}
EQUAL = {"eager": figures(1.0, 0.1, 100), "inductor": figures(1.0, 8.0, 100), "kiln": figures(1.0, 2.0, 100)}


def _judged(*records: Record) -> dict[str, bool | None]:
    return {outcome.target: outcome.met for outcome in outcomes(records)}


def test_all_targets_are_met_by_one_that_wins_everywhere() -> None:
    assert set(_judged(record("mlp-64", WIN)).values()) == {True}


def test_equal_figures_meet_the_targets_that_ask_for_no_more() -> None:
    assert _judged(record("mlp-64", EQUAL)) == {
        "at least as fast as inductor in every cell": True,
        "1.25 × inductor in geometric mean": False,
        "at least as fast as eager in every cell": True,
        "small networks at least 2 × inductor": False,
        "first call at most a quarter of inductor's": True,
        "peak memory with all processes no higher than inductor's": True,
        "peak memory of steps no higher than inductor's": True,
    }


def test_serving_is_judged_against_the_frozen_peer() -> None:
    frozen = {**WIN, "inductor-freezing": WIN["inductor"]}
    judged = _judged(record("resnet50-x1", frozen))
    assert judged["serving at least as fast as inductor frozen"] is True
    assert judged["serving 1.1 × inductor frozen in geometric mean"] is True
    slower = {**LOSS, "inductor-freezing": LOSS["inductor"]}
    assert _judged(record("resnet50-x1", slower))["serving at least as fast as inductor frozen"] is False


def test_frozen_models_are_judged_by_themselves() -> None:
    figures = {**WIN, "kiln-frozen": LOSS["kiln"], "inductor-freezing": LOSS["inductor"]}
    judged = _judged(record("resnet50-x1", figures))
    assert judged["serving at least as fast as inductor frozen"] is True
    assert judged["frozen, at least as fast as inductor frozen"] is False
    assert judged["frozen, 1.1 × inductor frozen in the mean"] is False


def test_one_cell_misses_what_holds_for_every_cell_and_the_mean_may_still_be_met() -> None:
    found = {o.target: o for o in outcomes([record("mlp-64", WIN), record("mish", LOSS)])}
    every = found["at least as fast as inductor in every cell"]
    assert (every.met, every.misses) == (False, ("mish inference float32 static (0.50 ×)",))
    assert every.figure == "mean 1.41 ×, worst 0.50 ×, 2 cells"
    assert found["1.25 × inductor in geometric mean"].met
    small = found["small networks at least 2 × inductor"]
    assert (small.met, small.figure) == (True, "mean 4.00 ×, worst 4.00 ×, 1 cell")
    first = found["first call at most a quarter of inductor's"]
    assert (first.met, first.misses) == (False, ("mish inference float32 static (0.50 ×)",))
    assert first.figure == "mean 0.35 ×, worst 0.50 ×, 2 cells"
    memory = found["peak memory of steps no higher than inductor's"]
    assert memory.misses == ("mish inference float32 static (1.50 ×)",)


def test_a_failure_of_ours_misses_every_target_and_one_of_the_peer_misses_none() -> None:
    assert set(_judged(record("mlp-64", FAILED)).values()) == {False}
    other = {**WIN, "inductor": Figures(failure="no compiler")}
    judged = _judged(record("mish", other))
    assert judged["at least as fast as eager in every cell"] is True
    assert judged["at least as fast as inductor in every cell"] is None


def test_nothing_is_judged_without_figures() -> None:
    assert set(_judged().values()) == {None}
    assert set(_judged(record("mlp-64", {"kiln": figures(1.0)})).values()) == {None}
    assert "not measured" in page([])


def test_the_page_says_where_and_how() -> None:
    text = page([record("mlp-64", WIN), record("mish", LOSS, day="2026-01-04")])
    for fact in ("A processor, 2 cores", "python 3.12.0, torch 2.13.0", "2026-01-02 to 2026-01-04", "0123456789abcdef"):
        assert fact in text
    assert text.count("`kiln bench --quick`") == 1
    assert re.search(r"\| threads of torch \| 2 \|", text)


def test_losses_and_failures_are_listed_the_worst_first() -> None:
    text = page([record("mlp-64", WIN), record("mish", LOSS), record("rope", FAILED, job=Job.training)])
    losses = text.partition("## Losses")[2].partition("## Too close")[0]
    rows = [line for line in losses.splitlines() if "float32" in line]
    assert rows == [
        "| rope training float32 static | failed | failed |  |  |  | took \\| more than 900 s |",
        "| mish inference float32 static | 0.50 | 0.50 | 0.50 | 0.50 | 10% |  |",
    ]
    assert "None: kiln is nowhere slower than eager or inductor" in page([record("mlp-64", WIN)])
    alone = {name: WIN[name] for name in ("eager", "kiln")}
    assert "None: kiln is nowhere slower than eager, and" in page([record("mlp-64", alone)])


def test_the_fastest_round_of_a_loss_is_shown_beside_its_median() -> None:
    calm, noisy = replace(figures(2.0), rounds=(2.2, 2.0, 2.0)), replace(figures(2.5), rounds=(2.5, 2.0, 3.0))
    text = page([record("mish", {"eager": calm, "kiln": noisy})])
    assert "| mish inference float32 static | 0.80 |  | 1.00 |  | 20% |  |" in text


def test_speedups_near_1_are_called_close_whether_won_or_lost() -> None:
    def measured(ms: float, spread: float) -> Figures:
        return replace(figures(ms), rounds=tuple(ms * (1 + spread * k) for k in (-2, -1, 0, 1, 2)))

    # Quartiles of these five rounds are three spreads apart: a standard error of 1.25 * 3 / 1.35 / 5**0.5 = 1.242.
    near = {"eager": measured(1.02, 0.0), "inductor": measured(0.99, 0.01), "kiln": measured(1.0, 0.01)}
    text = page([record("mish", near), record("rope", {"eager": measured(1.0, 0.1), "kiln": measured(0.5, 0.1)})])
    close = text.partition("## Too close to call")[2].partition("## Left out")[0]
    rows = [line for line in close.splitlines() if "float32" in line]
    assert rows == [
        "| mish inference float32 static | eager | 1.020 | 0.013 |",
        "| mish inference float32 static | inductor | 0.990 | 0.017 |",
    ]
    assert "Of 5 medians, 3 have a standard error of at most 3%" in close
    assert "No speed-up is within two standard errors of 1." in page([record("rope", {"eager": measured(1.0, 0.0)})])


def test_the_page_tells_how_long_rounds_go_on() -> None:
    text = " ".join(page([]).split())
    assert f"until {Effort().patience:g} s in all" in text
    assert f"is above {100 * Effort().certain:g} %; slow steps have five rounds" in text
    assert Effort().rounds == 5
    assert f"standard error of one is above {100 * LARGEST_ERROR:g} %, they go on until {Effort().utmost:g} s" in text


def test_every_cell_and_backend_is_a_row_with_as_many_columns_as_titles() -> None:
    text = page([record("mlp-64", WIN), record("rope", FAILED)])
    cells = text.partition("## Cells\n\n")[2].strip().splitlines()
    assert len(cells) == 2 + 6
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in cells} == {16}  # fifteen columns
    assert "|  |  | kiln | 1.000 | 8.00 | 10% | 2.00 | 20.00 | 100 | 0.50 | 75 | 50 | 0.50 |  |  |" in cells
    assert cells[-1].endswith("| failed: took \\| more than 900 s |")


def test_notes_say_what_ran_eagerly_and_what_differs() -> None:
    odd = figures(1.0, fallbacks=("no lowering",), slower=("training: 2 ms, 1 ms",) * 2, difference=0.5)
    text = page([record("mlp-64", {"eager": figures(1.0), "kiln": odd})])
    assert "1 graph could not be compiled and ran eagerly" in text
    assert "2 graphs ran eagerly, which was measured to be faster; differs from eager by 50.0%" in text


WILD = {**WIN, "kiln": replace(WIN["kiln"], rounds=(0.01, 1.0, 448.0))}


def test_what_says_nothing_is_in_no_mean_and_no_target_and_listed() -> None:
    records = [record("mlp-64", EQUAL), record("mish", WILD, load=Load(5.0, 0.75))]
    text = page(records)
    left_out = text.partition("## Left out")[2].partition("## Cells")[0]
    (row,) = (line for line in left_out.splitlines() if "float32" in line)
    assert row.startswith("| mish inference float32 static | kiln | 1.000 | 22400% |")
    assert row.endswith("| 3 | others took 75%, load average 5.0 |")
    assert "| all | kiln | inductor | 1 | 1.00 × |" in text
    assert "| all | inductor | eager | 2 |" in text, "the others of the cell count"
    found = {o.target: o for o in outcomes(records)}
    every = found["at least as fast as inductor in every cell"]
    assert (every.met, every.word, every.figure) == (
        True,
        "met where measured, 1 left out",
        "mean 1.00 ×, worst 1.00 ×, 1 cell",
    )
    assert every.left_out == ("mish inference float32 static",)
    assert found["first call at most a quarter of inductor's"].word == "met", "which has nothing to do with rounds"
    cells = text.partition("## Cells\n\n")[2].splitlines()
    (ours,) = (line for line in cells if "22400%" in line)
    assert ours.startswith("|  |  | kiln | 1.000 |  | 22400% | 2.00 | 20.00 |")
    assert "left out: rounds differ too much, standard error " in ours
    assert "None: kiln is nowhere slower than eager or inductor in the cells that are not left out" in text
    assert set(_judged(record("mlp-64", WILD)).values()) == {None, True}
    assert "None: no median has a standard error above 25%." in page([record("mlp-64", WIN)])


def test_the_page_says_how_busy_the_machine_was() -> None:
    loads = [Load(0.5, 0.02), Load(1.5, 0.04), Load(3.25, 0.5)]
    text = page([record(name, WIN, load=load) for name, load in zip(("mish", "rope", "gelu"), loads, strict=True)])
    told = "others took 4% of processor time in the median cell, 50% at most; load average 0.5 to 3.2"
    assert f"| load of the machine | {told} |" in text
    rows = [line.split(" | ") for line in text.splitlines() if " | inference float32 static | eager | " in line]
    assert [row[-2] for row in rows] == ["2%", "4%", "50%"]
    assert "| load of the machine | not recorded |" in page([record("mish", WIN)])


def test_the_picture_is_shown_where_there_is_one() -> None:
    assert "](some.png)" in page([record("mlp-64", WIN)], "some.png")
    assert ".png" not in page([record("mlp-64", WIN)])


def test_means_are_shown_for_each_kind_of_cell() -> None:
    text = page([record("mlp-64", WIN), record("rope", EQUAL, job=Job.training)])
    rows = re.findall(r"^\| (all|\w+ float32 static) \| kiln \| inductor \| (.*?) \|", text, re.M)
    assert rows == [("all", "2"), ("inference float32 static", "1"), ("training float32 static", "1")]
    alone = page([record("mlp-64", WIN)])
    assert "| all | kiln | inductor | 1 |" in alone
    assert "| inference float32 static | kiln" not in alone


def test_page_and_picture_are_written_side_by_side(tmp_path: Path) -> None:
    path, console = tmp_path / "docs" / "speed.md", Console(record=True, width=400)
    write([record("mlp-64", WIN)], console, plots=tmp_path / "bench.jsonl", page_path=path)
    for written in (path, path.with_suffix(".png"), tmp_path / "bench.png", tmp_path / "bench.html"):
        assert f"written: {written}\n" in console.export_text(clear=False)
    assert "](speed.png)" in path.read_text()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    write([], console, plots=tmp_path / "none.jsonl", page_path=path)
    assert not (tmp_path / "none.png").exists()
    assert "](speed.png)" not in path.read_text()
