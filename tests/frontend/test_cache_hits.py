"""What a second run of a program finds in the cache, counted for each kind of graph."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.processes import environment

PROGRAM = Path(__file__).with_name("cached_program.py")

ONE_FUNCTION = {"function hits": 1}
SECOND_RUN = {
    # The first graph asks for the target and the support functions too.
    "inference": {**ONE_FUNCTION, "support hits": 1, "target hits": 1},
    "training": ONE_FUNCTION,
    "dynamic": ONE_FUNCTION,
    "dynamic training": ONE_FUNCTION,
    "a pass of the user": ONE_FUNCTION,
    "a graph break": {"function hits": 2},
    "a check that names a number": ONE_FUNCTION,
    "an operator of the user": {"graph hits": 1},
    "a backward that never runs": {"function misses": 1, "graph hits": 1},
}


def _counts(cache: Path) -> dict[str, dict[str, int]]:
    own = environment(KILN_CACHE="1", KILN_CACHE_DIR=str(cache))
    command = [sys.executable, "-m", "tests.frontend.cached_program"]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_run_finds_all_that_the_first_stored(tmp_path: Path) -> None:
    first = _counts(tmp_path / "cache")
    assert first.keys() == SECOND_RUN.keys()
    assert all(any(what.endswith("stored") for what in counts) for counts in first.values()), first
    assert _counts(tmp_path / "cache") == SECOND_RUN
