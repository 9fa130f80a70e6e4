"""What counts as a loss, the order of losses, and the page that shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.operators.judge import is_overhead, losses, ratio, summaries, summary
from benchmarks.operators.layouts import Layout
from benchmarks.operators.page import page
from benchmarks.operators.records import Record
from tests.benchmarks.operators.made_up import cell, record
from torchkiln.bench.records import Figures

FASTER = record("faster", eager=(100.0, 100.0, 100.0), kiln=(50.0, 50.0, 50.0))
TWICE = record("twice", eager=(100.0, 100.0, 100.0), kiln=(200.0, 200.0, 200.0))
THRICE = record("thrice", eager=(100.0, 100.0, 100.0), kiln=(300.0, 310.0, 290.0))
FAILED = replace(TWICE, cell=cell("failed"), figures={"kiln": Figures(failure="TypeError: no")})
LEFT_OUT = replace(TWICE, cell=cell("left out"), figures={}, left_out_for="eager takes 3 µs")


@pytest.mark.parametrize(
    ("eager", "kiln", "is_loss"),
    [
        ((100.0,) * 3, (109.0,) * 3, False),  # not a tenth
        ((50.0,) * 3, (59.0,) * 3, False),  # not 10 µs
        ((100.0,) * 3, (112.0,) * 3, True),
        ((100.0,) * 3, (100.0, 300.0, 300.0), False),  # the fastest round shows that it can be as fast
        ((100.0, 500.0, 500.0), (200.0, 500.0, 500.0), False),  # only the fastest round is slower
    ],
)
def test_a_loss_is_a_tenth_and_ten_microseconds_by_medians_and_fastest_rounds(
    eager: tuple[float, ...], kiln: tuple[float, ...], is_loss: bool
) -> None:
    known = ratio(record("relu", eager=eager, kiln=kiln), "eager")
    assert known is not None
    assert known.is_loss == is_loss


def test_a_ratio_is_the_median_of_those_of_rounds() -> None:
    known = ratio(record("relu", eager=(100.0, 200.0, 400.0), kiln=(200.0, 300.0, 400.0)), "eager")
    assert known is not None
    assert known.median == pytest.approx(1.5)
    assert known.fastest == pytest.approx(2.0)
    assert known.more_us == pytest.approx(100.0)


def test_losses_are_sorted_by_their_ratio() -> None:
    assert losses([FASTER, TWICE, FAILED, THRICE, LEFT_OUT]) == [THRICE, TWICE]


def test_a_loss_within_the_overhead_of_a_call_is_told_apart() -> None:
    assert not is_overhead(TWICE)
    assert is_overhead(record("small", 45.0, eager=(50.0,) * 3, kiln=(90.0,) * 3))


def test_a_summary_counts_cells_losses_and_those_not_slower_than_the_peer() -> None:
    even = record("even", eager=(100.0,) * 3, kiln=(50.0,) * 3, inductor=(50.0,) * 3)
    behind = record("behind", eager=(100.0,) * 3, kiln=(50.0,) * 3, inductor=(25.0,) * 3)
    found = summary("all", [TWICE, FAILED, LEFT_OUT, even, behind])
    assert (found.cells, found.losses, found.overheads) == (3, 1, 0)
    assert (found.at_least_peer, found.with_peer) == (1, 2)
    assert found.times == pytest.approx(0.5 ** (1 / 3))


def test_summaries_are_of_all_and_of_each_kind_that_there_are_several_of() -> None:
    other = replace(TWICE, cell=cell("twice", Layout.rows))
    assert [line.name for line in summaries([TWICE, other])] == ["all", "contiguous", "rows"]


def _rows(text: str, heading: str) -> list[str]:
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][2:]


def test_the_page_has_the_losses_in_order_the_failures_and_what_is_left_out() -> None:
    wrong: Record = replace(FASTER, wrong="result 0: integers differ")
    text = page([wrong, TWICE, FAILED, THRICE, LEFT_OUT], 9)
    assert _rows(text, "Slower than eager") == [
        "| thrice | contiguous float32 forward 1 thread | 768×1024 | 100 | 300 | 3.00 | 3% | 2.90 | 10 |  |",
        "| twice | contiguous float32 forward 1 thread | 768×1024 | 100 | 200 | 2.00 | 0% | 2.00 | 10 |  |",
    ]
    failures = [row.split(" | ")[-1] for row in _rows(text, "Failures")]
    assert failures == ["result 0: integers differ |", "TypeError: no |"]
    assert _rows(text, "Left out") == ["| eager takes too short or too long | 1 |"]
    assert _rows(text, "Summary")[0] == "| all | 3 | 2 (66.7%) | 0 | 1.44 |"
    assert "Inductor" not in text
    assert "| cells taken so far | 5 of 9 |" in text


def test_the_page_compares_with_the_peer_where_it_was_measured() -> None:
    behind = record("behind", eager=(100.0,) * 3, kiln=(50.0,) * 3, inductor=(25.0,) * 3)
    text = page([behind], 1)
    assert _rows(text, "Slower than eager") == []
    assert len(_rows(text, "Slower than Inductor")) == 1
    assert "0.0% of 1" in text
