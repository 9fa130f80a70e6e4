"""Tests that need a card, and runs of them that go on where an earlier one stopped.

A machine with a card may have this source tree alone: then the backend is registered here.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch._dynamo.backends.registry import list_backends, register_backend

from torchkiln.backend import kiln

if "kiln" not in list_backends(exclude_tags=()):
    register_backend(kiln, name="kiln")

# Of the runner (tests/gpu/__main__.py): a file that tests which pass are added to, one of those that had passed before
# it started, one of those that a process of this part has begun, which part of the others to run, the seconds after
# which a test says where it is, and where to.
_PASSED, _BEFORE, _BEGUN = "KILN_GPU_PASSED", "KILN_GPU_BEFORE", "KILN_GPU_BEGUN"
_PART, _LIMIT, _LOG = "KILN_GPU_PART", "KILN_GPU_LIMIT", "KILN_GPU_LOG"
# What says most about a card comes first, what takes long last.
_ORDER = "test_on_card.py", "test_models.py", "test_conformance.py"
# The answer of a process that the card takes nothing from any more.
NO_CARD_LEFT = 70
# Characters of what is said of a failure.
_MOST_SAID = 6000
_outcomes: set[str] = set()  # of the phases of the test that runs


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
    before = _lines(_BEFORE)
    left = sorted((item for item in items if item.nodeid not in before), key=lambda item: _place(item.nodeid))
    begun = _lines(_BEGUN)  # divided as they were when the first process of this part began
    mine = [item for item in left[number::count] if item.nodeid not in begun]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


def _place(name: str) -> int:
    return next((k for k, file in enumerate(_ORDER) if file in name), len(_ORDER))


def _lines(variable: str) -> set[str]:
    path = Path(os.environ[variable])
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()


def _add(variable: str, line: str) -> None:
    with open(os.environ[variable], "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    if _BEGUN not in os.environ:
        return
    _outcomes.clear()
    _add(_BEGUN, nodeid)
    faulthandler.dump_traceback_later(float(os.environ[_LIMIT]), file=_log())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Told at once: a process that is ended later tells nothing."""
    if _BEGUN not in os.environ:
        return
    _outcomes.add(report.outcome)
    if report.failed:
        text = report.longreprtext
        said = text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID // 2]}\n...\n{text[-_MOST_SAID // 2 :]}"
        print(f"\nFAILED {report.nodeid} ({report.when}): {_reason(text)}\n{said}", file=_log(), flush=True)
    if report.when == "teardown" and _outcomes == {"passed"}:
        _add(_PASSED, report.nodeid)


def _reason(text: str) -> str:
    """The first line of the error that a traceback shows."""
    return next((line[2:].strip() for line in text.splitlines() if line.startswith("E ")), "")


@cache
def _log() -> TextIO:
    return open(os.environ[_LOG], "a", encoding="utf-8")


def pytest_runtest_logfinish(nodeid: str) -> None:
    """After some errors a card takes nothing from a process any more: what came next would fail for no fault of its."""
    if _BEGUN not in os.environ:
        return
    faulthandler.cancel_dump_traceback_later()
    if "failed" in _outcomes and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"no card is left to this process: {error}", returncode=NO_CARD_LEFT)


@pytest.fixture
def on_card() -> Iterator[torch.device]:
    """The card, with no compiled code of earlier tests."""
    torch._dynamo.reset()
    yield torch.device("cuda", torch.cuda.current_device())
    torch._dynamo.reset()
    torch.cuda.synchronize()
