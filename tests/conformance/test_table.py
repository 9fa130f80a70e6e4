"""The page of the conformance suite: it says how it was made, and keeps the section about another backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance import table
from conformance.cases import Case
from conformance.check import CAPTURE_FAILED, PASSED, WRONG, Verdict
from conformance.records import Record, new_record


def _record(operator: str, *verdicts: Verdict, backend: str = "kiln") -> Record:
    record = new_record(Case(operator, "float32"), backend, "2 each")
    record.add(verdicts)
    return record


def test_the_page_names_the_command_that_makes_it() -> None:
    records = [_record("add", Verdict(0, PASSED), Verdict(1, PASSED))]
    assert "`make conformance ARGS='--each 2'`" in table.text(records, "--each 2")
    assert "`make conformance`" in table.text(records, "")
    assert table.commit() in table.text(records, "")


def test_records_of_other_sources_are_said_to_be_such() -> None:
    old = replace(_record("add"), source="0123456789abcdef")
    assert "The last run of" not in table.text([_record("add")], "")
    head = table.text([_record("mul"), old], "").split("## Totals")[0]
    assert "The last run of 1 with sources of digest 0123456789abcdef; the other 1 pairs" in head


def test_another_backend_gets_a_section_that_stays_when_the_page_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "PAGE", tmp_path / "page.md")
    ours = [_record("add", Verdict(0, PASSED)), _record("sub", Verdict(0, CAPTURE_FAILED, "cannot"))]
    theirs = [
        _record("add", Verdict(0, WRONG, "values: off"), backend="other"),
        _record("sub", Verdict(0, CAPTURE_FAILED, "cannot"), backend="other"),
    ]
    table.write(ours, options="--each 2")
    table.write_comparison(ours, theirs, backend="other", options="--backend other --each 2")
    table.write(ours, options="")
    text = (tmp_path / "page.md").read_text()
    assert "Written by `make conformance` on" in text
    assert "| passed | 1 | 0 |" in text
    assert "| `add` | float32 1 | wrong | values: off |" in text
    table.write_comparison(ours, ours, backend="other", options="--backend other --each 2")
    assert (tmp_path / "page.md").read_text().count("## The same samples") == 1
