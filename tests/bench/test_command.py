"""``kiln bench`` as a user types it: what it writes, what it prints, and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.bench.made_up import figures, record
from torchkiln.bench.records import Figures, append
from torchkiln.cli import app

runner = CliRunner()
GOOD = {"eager": figures(2.0, 0.1), "inductor": figures(2.0, 8.0), "kiln": figures(1.0, 2.0)}


def bench(tmp_path: Path, *given: str) -> tuple[int, str]:
    arguments = ["bench", "--no-measure", "--output", str(tmp_path / "bench.jsonl"), *given]
    result = runner.invoke(app, arguments)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_what_is_on_record_is_shown_drawn_and_written(tmp_path: Path) -> None:
    append(tmp_path / "bench.jsonl", record("mish", GOOD))
    append(tmp_path / "bench.jsonl", record("rope", GOOD))
    code, output = bench(tmp_path, "--models", "mish", "--page", str(tmp_path / "docs" / "page.md"))
    assert code == 0, output
    assert "2.00 ×" in output
    text = (tmp_path / "docs" / "page.md").read_text()
    assert "mish inference float32 static" in text or "| mish | inference float32 static |" in text
    assert "rope" not in text
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "bench.html").read_text().startswith("<!DOCTYPE html>")


def test_no_plot_draws_nothing(tmp_path: Path) -> None:
    append(tmp_path / "bench.jsonl", record("mish", GOOD))
    assert bench(tmp_path, "--no-plot")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bench.jsonl"]


def test_without_matplotlib_the_results_are_shown_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    append(tmp_path / "bench.jsonl", record("mish", GOOD))
    code, output = bench(tmp_path)
    assert code == 0
    assert "needs matplotlib; install it with: pip install 'torchkiln[bench]'" in output


def test_a_failure_of_ours_is_exit_code_1(tmp_path: Path) -> None:
    append(tmp_path / "bench.jsonl", record("mish", {"eager": figures(2.0), "kiln": Figures(failure="ended [early]")}))
    code, output = bench(tmp_path)
    assert code == 1
    assert "failed: mish inference float32 static: kiln: ended [early]" in output


def test_a_wrong_name_is_exit_code_2_and_one_sentence(tmp_path: Path) -> None:
    code, output = bench(tmp_path, "--models", "mihs")
    assert code == 2
    assert "Unknown model 'mihs' (did you mean 'mish'?)" in output
    assert "Traceback" not in output
