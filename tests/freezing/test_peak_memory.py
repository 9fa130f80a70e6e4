"""Freezing takes at most 2.2 times the memory of the weights, and about their own once they are discarded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_memory_while_freezing_and_after() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "tests.freezing.peak_memory", "discard"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "KILN_CACHE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["megabytes"] > 600
    assert found["peak"] < 2.2
    assert found["after"] < 1.3
