"""Counters: snapshots, threads, stages inside stages, and the printed table."""

from __future__ import annotations

import threading
import time

import pytest

from torchkiln.stats import (
    PassRecord,
    record_fallback,
    record_graph,
    record_pass,
    reset_stats,
    stage_seconds,
    stats,
)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset_stats()


def test_a_snapshot_does_not_change_later() -> None:
    record_graph(nodes=5, kernels=2, launches=3, extern_calls={"aten.mm.default": 1})
    before = stats()
    record_graph(nodes=5, kernels=1, launches=1, extern_calls={"aten.mm.default": 4})
    assert (before.graphs, before.kernels, before.launches, dict(before.extern_calls)) == (
        1,
        2,
        3,
        {"aten.mm.default": 1},
    )
    after = stats()
    assert (after.graphs, after.kernels, after.launches, dict(after.extern_calls)) == (2, 3, 4, {"aten.mm.default": 5})


def test_reset_starts_from_zero() -> None:
    record_fallback("forward graph", "why")
    record_pass(PassRecord(1, "joint", "no_ops", 0.0, changed=False))
    reset_stats()
    assert stats() == type(stats())()


def test_threads_lose_no_count() -> None:
    def count() -> None:
        for _ in range(500):
            record_graph(nodes=5, kernels=1, launches=2, extern_calls={"op": 1})

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stats().graphs, stats().launches, stats().extern_calls["op"]) == (2000, 4000, 2000)


def test_a_stage_does_not_count_the_stages_inside_it() -> None:
    start = time.perf_counter()
    with stage_seconds("outer"):
        with stage_seconds("inner"):
            time.sleep(0.05)
        with stage_seconds("inner"):
            time.sleep(0.05)
    whole = time.perf_counter() - start
    seconds = stats().seconds
    assert seconds["inner"] >= 0.1
    assert seconds["outer"] < seconds["inner"]
    assert seconds["outer"] + seconds["inner"] <= whole


def test_a_stage_that_raises_is_timed() -> None:
    with pytest.raises(ValueError, match="x"), stage_seconds("broken"):
        raise ValueError("x")
    assert "broken" in stats().seconds


def test_the_table_shows_everything() -> None:
    record_graph(nodes=5, kernels=2, launches=3, extern_calls={"aten.mm.default": 7})
    record_fallback("backward graph", "lowering failed at node sum_1")
    record_pass(PassRecord(4, "joint", "no_ops", 0.5, changed=True))
    record_pass(PassRecord(5, "joint", "other", 0.0, changed=False, skipped=True))
    with stage_seconds("lowering"):
        pass
    text = str(stats())
    for part in ("2 distinct, 3 launches", "aten.mm.default", "sum_1", "lowering", "joint/no_ops", "skipped"):
        assert part in text
