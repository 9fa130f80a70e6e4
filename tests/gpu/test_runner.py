"""How the tests that need a card are divided among processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import conftest


def _part(number: int, names: list[str]) -> list[str]:
    items: list[Any] = [SimpleNamespace(nodeid=name, get_closest_marker=lambda _: None) for name in names]
    config: Any = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILN_GPU_PART", f"{number}/2")
        conftest.pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items]


def test_a_process_that_starts_late_divides_what_the_others_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, before = tmp_path / "passed.txt", tmp_path / "before.txt"
    before.write_text("test c\n", encoding="utf-8")
    monkeypatch.setenv("KILN_GPU_PASSED", str(passed))
    monkeypatch.setenv("KILN_GPU_BEFORE", str(before))
    names = [f"test {letter}" for letter in "abcdef"]
    first = _part(0, names)
    conftest.pytest_runtest_logreport(SimpleNamespace(when="call", passed=True, nodeid=first[0]))  # type: ignore[arg-type]
    assert sorted(first + _part(1, names)) == ["test a", "test b", "test d", "test e", "test f"]
    assert passed.read_text(encoding="utf-8") == "test a\n"
