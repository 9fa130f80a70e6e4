"""A short run of the soak, and what its judgement of memory says of runs that grow and that do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.soak.memory import MIB, Sample, growth


def test_a_short_soak_finds_nothing() -> None:
    """Every activity at least once; ``make soak`` runs them for half an hour and judges memory."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--minutes", "0.3"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "no failures" in done.stdout


def _run(bytes_per_minute: float, graphs_per_minute: float, *, minutes: int = 10) -> list[Sample]:
    times = range(0, 60 * minutes, 10)
    return [
        Sample(t, int(graphs_per_minute * t / 60), int(400 * MIB + bytes_per_minute * t / 60 + 3 * MIB * (t % 20 == 0)))
        for t in times
    ]


def test_memory_that_grows_without_compilations_is_a_failure() -> None:
    flat, grows = growth(_run(0, 0)), growth(_run(3 * MIB, 0))
    assert flat is not None
    assert not flat.is_too_much
    assert grows is not None
    assert grows.is_too_much
    assert abs(grows.per_minute - 3 * MIB) < 0.2 * MIB


def test_what_torch_keeps_of_compiled_functions_is_allowed_and_more_is_not() -> None:
    kept, more = growth(_run(6 * MIB, 60)), growth(_run(13 * MIB, 60))
    assert kept is not None
    assert not kept.is_too_much
    assert more is not None
    assert more.is_too_much


def test_a_run_that_is_too_short_is_not_judged() -> None:
    assert growth(_run(100 * MIB, 0, minutes=2)) is None
