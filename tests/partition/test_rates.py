"""Figures of the machine: the same in every process, however busy the machine is while they are measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.partition.measured import joint_graph
from tests.partition.models import Transformer
from torchkiln.config import Settings
from torchkiln.partition import rates
from torchkiln.partition.budget import Planner
from torchkiln.partition.classify import NodeInfo
from torchkiln.target import capture_target

TARGET = capture_target(Settings())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a process that knows no figure yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates.flops_per_second.cache_clear()
    rates.bandwidth.cache_clear()
    yield tmp_path
    rates.flops_per_second.cache_clear()
    rates.bandwidth.cache_clear()


def test_the_first_process_decides(folder: Path) -> None:
    assert rates.stored_rate(TARGET, "apples", lambda: 5.0e9) == 2.0**32
    assert rates.stored_rate(TARGET, "apples", lambda: 1.0) == 2.0**32
    assert rates.stored_rate(TARGET, "pears", lambda: 1.0) == 1.0
    assert len(list((folder / "torchkiln" / "rates").iterdir())) == 2


def test_a_process_that_comes_second_while_measuring_takes_the_figure_of_the_first(folder: Path) -> None:
    def slow() -> float:
        rates.stored_rate(TARGET, "apples", lambda: 1024.0)  # another process finishes meanwhile
        return 4.0

    assert rates.stored_rate(TARGET, "apples", slow) == 1024.0


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"rate": "much"}', '{"rate": -1}', '{"rate": true}'])
def test_a_file_that_makes_no_sense_is_done_without(folder: Path, content: str) -> None:
    rates.stored_rate(TARGET, "apples", lambda: 8.0)
    (path,) = (folder / "torchkiln" / "rates").iterdir()
    path.write_text(content)
    assert rates.stored_rate(TARGET, "apples", lambda: 16.0) == 16.0


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchkiln").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates.stored_rate(TARGET, "apples", lambda: 8.1) == 8.0


@pytest.mark.parametrize(("measured", "kept"), [(1.0, 1.0), (1.4, 1.0), (1.5, 2.0), (2.8, 2.0), (2.9, 4.0), (0.4, 0.5)])
def test_figures_are_rounded_to_powers_of_two(measured: float, kept: float) -> None:
    assert rates.rounded(measured) == kept


def test_plans_are_the_same_however_fast_the_machine_is_at_the_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    joint = joint_graph(Transformer(), torch.randint(50, (2, 16)))
    info = NodeInfo(joint.module.graph, joint.num_fwd_outputs)
    plans = []
    for seconds in (1e-4, 3e-6):
        rates.flops_per_second.cache_clear()
        rates.bandwidth.cache_clear()
        monkeypatch.setattr(rates, "best_seconds", lambda _run, _repetitions, seconds=seconds: seconds)
        plans.append([(plan.saved, plan.extra_seconds) for _, plan in Planner(info, Settings(), TARGET).ladder()])
    assert plans[0] == plans[1]
    stored = [json.loads(path.read_text()) for path in (folder / "torchkiln" / "rates").iterdir()]
    assert all(entry["machine"] and entry["rate"] > 0 for entry in stored)
