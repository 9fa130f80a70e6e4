"""Processes that compile the same graphs into one cache, some of which are killed: results stay right."""

from __future__ import annotations

from pathlib import Path

from tests.cache.compiling import compile_and_kill, least_runs

PROCESSES, KILLED = 4, 2
GRAPHS = ("softmax", "write to an input", "matmul, training", "reduction, dynamic", "MLP")


def test_several_processes_fill_one_cache_although_some_are_killed(tmp_path: Path) -> None:
    outcome = compile_and_kill(tmp_path, GRAPHS, PROCESSES, KILLED, seed=0)
    assert outcome.compared == PROCESSES * len(GRAPHS)
    assert set(outcome.compiled) == set(GRAPHS)
    # One compiles and the others wait. Another does where the first is killed, and what was compiled may be lost then.
    assert outcome.compiled.total() <= least_runs(GRAPHS) + 2 * outcome.killed.total()
