"""The examples of docs/aot.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "aot.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"example {number + 1}", "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} >= {"model.kiln", "mlp.kiln", "mlp.so", "mlp.h"}
