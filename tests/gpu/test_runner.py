"""How the tests that need a card are divided among processes, and what happens to those that hang or die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import conftest
from tests.gpu.__main__ import ROOT, Part, watch

# Stands in for pytest: begins what it has not begun yet, and comes to an end, dies or hangs as the name says.
_PROCESS = """
import os, sys, time
begun = os.environ["KILN_GPU_BEGUN"]
for name in ("good", "hangs", "kills", "exits", "last"):
    if os.path.exists(begun) and name in open(begun).read():
        continue
    print(name, file=open(begun, "a"), flush=True)
    if name == "hangs":
        time.sleep(100)
    if name == "kills":
        os.kill(os.getpid(), 11)
    if name == "exits":
        sys.exit(70)
"""


def _part(number: int, names: list[str]) -> list[str]:
    items: list[Any] = [SimpleNamespace(nodeid=name, get_closest_marker=lambda _: None) for name in names]
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILN_GPU_PART", f"{number}/2")
        conftest.pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items]


def _report(name: str, when: str, outcome: str) -> Any:
    return SimpleNamespace(nodeid=name, when=when, outcome=outcome, failed=outcome == "failed", longreprtext="E  why")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("passed", "before", "begun", "log"):
        monkeypatch.setenv(f"KILN_GPU_{name.upper()}", str(tmp_path / f"{name}.txt"))
    monkeypatch.setenv("KILN_GPU_LIMIT", "1000")
    conftest._log.cache_clear()
    return tmp_path


def _run(name: str, **outcomes: str) -> None:
    conftest.pytest_runtest_logstart(name)
    for when, outcome in outcomes.items():
        conftest.pytest_runtest_logreport(_report(name, when, outcome))
    conftest.pytest_runtest_logfinish(name)


def test_a_process_that_starts_late_divides_what_the_others_did(files: Path) -> None:
    (files / "before.txt").write_text("test c\n", encoding="utf-8")
    names = [f"test {letter}" for letter in "abcdef"]
    first = _part(0, names)
    _run(first[0], setup="passed", call="passed", teardown="passed")
    (files / "begun.txt").unlink()  # that of another part
    assert sorted(first + _part(1, names)) == ["test a", "test b", "test d", "test e", "test f"]
    assert (files / "passed.txt").read_text(encoding="utf-8") == "test a\n"


def test_a_process_that_follows_another_goes_on_behind_what_that_began(files: Path) -> None:
    names = [f"test_models.py {letter}" for letter in "abcdef"]
    mine = _part(0, names)
    _run(mine[0], setup="passed", call="failed", teardown="passed")
    assert _part(0, names) == mine[1:]


def test_what_is_skipped_or_fails_anywhere_has_not_passed(files: Path) -> None:
    _run("a", setup="skipped", teardown="passed")
    _run("b", setup="passed", call="passed", teardown="failed")
    assert not (files / "passed.txt").exists()
    assert "FAILED b (teardown): why" in (files / "log.txt").read_text(encoding="utf-8")


def test_what_a_card_shows_first_comes_first(files: Path) -> None:
    names = [f"tests/gpu/test_{name}.py::test" for name in ("conformance", "models", "on_card")]
    assert _part(0, names)[0] == names[2]


def test_tests_that_hang_or_die_do_not_end_the_run(tmp_path: Path) -> None:
    part = Part(0, [sys.executable, "-c", _PROCESS], {}, tmp_path)
    watch([part], seconds=60, limit=1.5)
    assert part.begun.read_text(encoding="utf-8").split() == ["good", "hangs", "kills", "exits", "last"]
    assert part.codes == [-9, -11, 70, 0]
    log = part.log.read_text(encoding="utf-8")
    assert [line for line in log.splitlines() if line] == [
        *("ENDED after 2 s in hangs", "ENDED with -11 in kills", "ENDED with 70 in exits")
    ]


def test_a_process_that_begins_nothing_is_not_started_for_ever(tmp_path: Path) -> None:
    part = Part(0, [sys.executable, "-c", "raise SystemExit(2)"], {}, tmp_path)
    watch([part], seconds=60, limit=10)
    assert part.codes == [2]
    assert "ENDED with 2 in no test" in part.log.read_text(encoding="utf-8")


def test_time_ends_a_run(tmp_path: Path) -> None:
    part = Part(0, [sys.executable, "-c", _PROCESS], {}, tmp_path)
    watch([part], seconds=1, limit=100)
    assert part.codes == [-9]
    assert part.begun.read_text(encoding="utf-8").split() == ["good", "hangs"]


def test_packages_of_the_same_names_are_not_found_instead(tmp_path: Path) -> None:
    for name in ("tests", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import tests.gpu, benchmarks.gpu"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)
