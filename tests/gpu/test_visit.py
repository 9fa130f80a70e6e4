"""A visit to a machine with a card: its stages keep to their time, and what they found is kept."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests.gpu.visit import Stage, pack, run


def test_a_stage_that_hangs_leaves_time_to_those_after_it(capfd: pytest.CaptureFixture[str]) -> None:
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"
    stages = (
        Stage("hangs", ("-c", hangs), 1.0, minutes=0.01, timed=False),
        Stage("fails", ("-c", "raise SystemExit(3)"), 0.5, timed=False),
        Stage("told", ("-c", "import sys; print('given', *sys.argv[1:])"), 1.0),
    )
    run(stages, 30)
    said = capfd.readouterr().out
    assert "=== hangs: stopped after 1 s" in said
    assert "=== fails: ended with 3" in said
    assert "given --minutes 0.3" in said


def test_an_archive_has_the_end_of_long_logs(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * (2 << 20) + b"end")
    (tmp_path / "passed.txt").write_text("one\n", encoding="utf-8")
    pack(tmp_path, tmp_path / "gpu.tar.gz")
    with tarfile.open(tmp_path / "gpu.tar.gz") as found:
        assert found.getnames() == ["a.log", "passed.txt"]
        assert found.getmember("a.log").size == 1 << 20
        log = found.extractfile("a.log")
        assert log is not None
        assert log.read().endswith(b"xend")
