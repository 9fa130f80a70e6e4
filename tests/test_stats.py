"""Counters: snapshots, threads, stages inside stages, and the printed table."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from torchkiln.recorder import Record, Recorder, listen, timed_stage
from torchkiln.stats import PassRecord, reset_stats, stats


@pytest.fixture(autouse=True)
def _fresh() -> None:
    reset_stats()


def _graph(
    kind: str = "inference",
    operations: int = 4,
    kernels: int = 1,
    launches: int = 1,
    recorder: Recorder | None = None,
    **extern_calls: int,
) -> None:
    """A graph with these calls of operators of ATen."""
    calls = {f"aten.{name}.default": count for name, count in extern_calls.items()}
    (recorder or Recorder()).compiled(
        kind,
        nodes=operations + 3,
        operations=operations,
        kernels=kernels,
        launches=launches,
        extern_calls=calls,
    )


def test_a_snapshot_does_not_change_later() -> None:
    _graph(kernels=2, launches=3, mm=1)
    before = stats()
    _graph(kernels=1, launches=1, mm=4)
    assert (before.graphs, before.kernels, before.launches, dict(before.extern_calls)) == (
        1,
        2,
        3,
        {"aten.mm.default": 1},
    )
    after = stats()
    assert (after.graphs, after.kernels, after.launches, dict(after.extern_calls)) == (2, 3, 4, {"aten.mm.default": 5})


def test_reset_starts_from_zero() -> None:
    Recorder().fell_back("forward graph", "why", operations=3)
    Recorder().ran_pass(PassRecord(1, "joint", "no_ops", 0.0, changed=False))
    reset_stats()
    assert stats() == type(stats())()


def test_threads_lose_no_count() -> None:
    def count() -> None:
        for _ in range(500):
            _graph(kernels=1, launches=2, mm=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (stats().graphs, stats().launches, stats().extern_calls["aten.mm.default"]) == (2000, 4000, 2000)


def test_a_stage_does_not_count_the_stages_inside_it() -> None:
    start = time.perf_counter()
    with timed_stage("outer"):
        with timed_stage("inner"):
            time.sleep(0.05)
        with timed_stage("inner"):
            time.sleep(0.05)
    whole = time.perf_counter() - start
    seconds = stats().seconds
    assert seconds["inner"] >= 0.1
    assert seconds["outer"] < seconds["inner"]
    assert seconds["outer"] + seconds["inner"] <= whole


def test_a_stage_that_raises_is_timed() -> None:
    with pytest.raises(ValueError, match="x"), timed_stage("broken"):
        raise ValueError("x")
    assert "broken" in stats().seconds


def test_the_table_shows_everything() -> None:
    _graph(kernels=2, launches=3, mm=7)
    Recorder().fell_back("backward graph", "lowering failed at node sum_1", operations=4)
    Recorder().ran_pass(PassRecord(4, "joint", "no_ops", 0.5, changed=True))
    Recorder().ran_pass(PassRecord(5, "joint", "other", 0.0, changed=False, skipped=True))
    with timed_stage("lowering"):
        pass
    text = str(stats())
    for part in ("2 distinct, 3 launches", "aten.mm.default", "sum_1", "lowering", "joint/no_ops", "skipped"):
        assert part in text


def test_the_share_of_operations_that_run_compiled_comes_first() -> None:
    assert stats().compiled_share is None
    assert str(stats()).startswith("no operation has come to torchkiln so far\n")
    _graph(operations=6, kernels=2, launches=3, mm=2)
    assert stats().compiled_share == 1
    assert str(stats()).startswith("100 % of 6 operations run compiled, 2 of them as calls of torch operators; 0 run")
    Recorder().fell_back("captured graph", "no way", operations=2)
    assert (stats().operations, stats().compiled_operations, stats().compiled_share) == (8, 6, 0.75)
    assert str(stats()).startswith("75 % of 8 operations run compiled, 2 of them as calls of torch operators; 2 run")


def test_a_share_below_all_is_never_shown_as_all() -> None:
    _graph(operations=99_999)
    Recorder().fell_back("captured graph", "no way", operations=1)
    assert str(stats()).startswith("99 % of 100000 operations")


def test_more_calls_than_operations_are_not_more_than_all() -> None:
    _graph(operations=2, mm=5)
    assert ", 2 of them as calls of torch operators" in str(stats())
    assert stats().by_graph[0].extern_calls == 5


def test_every_graph_is_listed_with_how_it_runs() -> None:
    _graph("forward", 6, 2, 3, mm=1)
    Recorder().fell_back("backward graph", "lowering failed at node sum_1", operations=1)
    lines = str(stats()).partition("each graph           2\n")[2].splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "forward 6 operations compiled: 2 kernels, 3 launches, 1 extern call",
        "backward 1 operation eager: lowering failed at node sum_1",
    ]


def test_a_long_list_of_graphs_ends_in_how_many_more_there_are() -> None:
    for _ in range(25):
        _graph()
    text = str(stats())
    assert text.count("  compiled: ") == 20
    assert text.endswith("and 5 more in stats().by_graph")
    assert len(stats().by_graph) == 25


def test_graphs_measured_to_be_slower_count_as_eager_with_those_of_their_compilation() -> None:
    mine, other = Recorder(), Recorder()
    _graph("forward", recorder=mine)
    _graph("inference", recorder=other)
    _graph("backward", recorder=mine)
    mine.is_slower("training", "compiled 2 ms, eager 1 ms")
    assert [(graph.kind, graph.compiled) for graph in stats().by_graph] == [
        ("forward", False),
        ("inference", True),
        ("backward", False),
    ]
    assert "eager 1 ms" in stats().by_graph[0].reason
    assert stats().compiled_share == pytest.approx(1 / 3)


def test_a_listener_gets_what_every_stage_made_under_one_number() -> None:
    found: list[Record] = []
    compiled = torch.compile(lambda x, w: (x @ w).relu().sum(), backend="kiln", options={"fallback": False})
    with listen(found.append):
        compiled(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)).backward()
    after = ["program", "plan", "code"]
    assert [record.stage for record in found] == [
        *("captured graph", "joint graph", "forward graph", *after, "calling convention", "backward graph", *after)
    ]
    assert len({record.compilation for record in found}) == 1
    compiled(torch.randn(3, 4), torch.randn(4, 4))
    assert len(found) == 11  # nobody listens any more
