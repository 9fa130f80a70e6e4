"""Ratios over many cells, against ones computed by hand, and the tables that show them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rich.console import Console

from tests.bench.made_up import figures, record
from torchkiln.bench.command import failures
from torchkiln.bench.load import Load
from torchkiln.bench.records import Figures
from torchkiln.bench.summary import geometric_mean, summaries
from torchkiln.bench.table import cells_table, summary_table, targets_table

MISH = {"eager": figures(8.0, 0.1, 100), "inductor": figures(4.0, 8.0, 200), "kiln": figures(1.0, 2.0, 50)}
ROPE = {"eager": figures(1.0, 0.1, 100), "inductor": figures(1.0, 8.0, 200), "kiln": figures(2.0, 2.0, 200)}
BERT = {"eager": figures(5.0), "inductor": figures(5.0), "kiln": Figures(failure="took more than 900 s")}
RECORDS = [record("mish", MISH), record("rope", ROPE), record("bert", BERT)]


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geometric_mean([]))


def test_summaries_are_ratios_over_the_cells_both_got_through() -> None:
    found = {(s.backend, s.against): s for s in summaries(RECORDS)}
    assert set(found) == {("kiln", "eager"), ("kiln", "inductor"), ("inductor", "eager")}
    ours = found["kiln", "inductor"]
    assert ours.cells == 2
    assert ours.speedup == pytest.approx(math.sqrt(4 * 0.5))
    assert (ours.least, ours.least_at) == (0.5, "rope inference float32 static")
    assert ours.first_call == pytest.approx(0.25)
    assert ours.memory == pytest.approx(math.sqrt(0.25 * 1.0))
    assert found["kiln", "eager"].speedup == pytest.approx(math.sqrt(8 * 0.5))
    assert found["inductor", "eager"].cells == 3
    assert found["inductor", "eager"].speedup == pytest.approx((2 * 1 * 1) ** (1 / 3))


def _text(shown: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_the_tables_show_the_figures_and_the_failures() -> None:
    text = _text(cells_table(RECORDS))
    line = next(line for line in text.splitlines() if "kiln" in line and "1.000" in line)
    assert [word for word in line.replace("│", " ").split() if word] == [
        *("kiln", "1.000", "10%", "8.00", "2.00", "100", "50", "0.50")
    ]
    assert "took more than 900 s" in text
    assert "1.41 ×" in _text(summary_table(RECORDS))


def test_the_table_says_how_busy_the_machine_was_and_what_is_left_out() -> None:
    wild = {**MISH, "kiln": replace(MISH["kiln"], rounds=(0.01, 1.0, 448.0))}
    text = _text(cells_table([record("mish", wild, load=Load(2.0, 0.3)), record("rope", ROPE, load=Load(4.0, 0.5))]))
    assert "others took 40% of processor time in the median cell, 50% at most; load average 2.0 to 4.0" in text
    line = next(line for line in text.splitlines() if "22400%" in line)
    assert line.replace("│", " ").split()[:4] == ["kiln", "1.000", "22400%", "2.00"], "no speed-up"
    assert "left out: rounds" in text
    assert "where measured, 1 left out" in _text(targets_table([record("mish", wild), record("rope", MISH)]))
    assert "1.00 ×" not in _text(summary_table([record("mish", wild)]))


def test_only_failures_of_our_own_backend_fail_the_command() -> None:
    assert failures(RECORDS) == ["bert inference float32 static: kiln: took more than 900 s"]
    assert failures([record("mish", {"inductor": Figures(failure="no compiler")})]) == []
