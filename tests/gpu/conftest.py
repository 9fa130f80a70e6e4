"""Tests that need a card, and runs of them that go on where an earlier one stopped.

A machine with a card may have this source tree alone: then the backend is registered here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.registry import list_backends, register_backend

from torchkiln.backend import kiln

if "kiln" not in list_backends(exclude_tags=()):
    register_backend(kiln, name="kiln")

# Of the runner (tests/gpu/__main__.py): a file that tests which pass are added to, one of those that had passed before
# it started, and which part of the others to run.
_PASSED, _BEFORE, _PART = "KILN_GPU_PASSED", "KILN_GPU_BEFORE", "KILN_GPU_PART"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        reason = "no NVIDIA card here, or a torch built without CUDA"
        for item in items:
            if item.get_closest_marker("card") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    if _BEFORE not in os.environ:
        return
    number, count = map(int, os.environ[_PART].split("/"))
    before = set(Path(os.environ[_BEFORE]).read_text(encoding="utf-8").splitlines())
    left = [item for item in items if item.nodeid not in before]
    mine = left[number::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and _PASSED in os.environ:
        with open(os.environ[_PASSED], "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


@pytest.fixture
def on_card() -> Iterator[torch.device]:
    """The card, with no compiled code of earlier tests."""
    torch._dynamo.reset()
    yield torch.device("cuda", torch.cuda.current_device())
    torch._dynamo.reset()
    torch.cuda.synchronize()
