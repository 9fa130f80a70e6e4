"""Which cells there are, and that a sample is the same in every run."""

from __future__ import annotations

import pytest

from benchmarks.operators.cells import Job, cells, sample
from benchmarks.operators.entries import chosen
from benchmarks.operators.layouts import Layout
from benchmarks.operators.programs import PROGRAMS
from conformance.cases import database

ENTRIES = [("a", (Layout.contiguous, Layout.rows)), ("b", (Layout.contiguous,))]


def test_cells_are_all_combinations_of_the_layouts_an_entry_has() -> None:
    found = cells(ENTRIES, [Layout.rows, Layout.contiguous], ["float32"], [1, 2])
    assert len(found) == len(set(found)) == 3 * 2 * 2
    assert {(cell.entry, cell.layout) for cell in found} == {
        *(("a", Layout.rows), ("a", Layout.contiguous), ("b", Layout.contiguous)),
    }
    assert {cell.job for cell in found} == set(Job)
    assert [cell.threads for cell in found] == [1] * 6 + [2] * 6
    assert str(found[0]) == "a rows float32 forward 1 thread"


def test_a_sample_is_the_same_in_every_run_and_in_order() -> None:
    every = cells([(str(k), tuple(Layout)) for k in range(9)], list(Layout), ["float32"], [1])
    part = sample(every, 20)
    assert len(part) == 20
    assert part == sample(every, 20)
    assert part == [cell for cell in every if cell in part]
    assert sample(every, 0) == sample(every, 10_000) == every


def test_words_choose_an_entry_by_its_name_or_else_those_with_the_word_in_it() -> None:
    assert [entry.name for entry in chosen("row sum,flip")] == ["row sum", "flip"]
    assert [entry.name for entry in chosen("flip of")] == ["flip of columns", "flip of rows"]
    with pytest.raises(LookupError, match="no entry is called neither"):
        chosen("neither")


def test_no_program_has_the_name_of_an_operator() -> None:
    assert not set(PROGRAMS) & set(database())
