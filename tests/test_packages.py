"""The packages form the order that docs/architecture.md draws: each imports only from those above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "torchkiln"


def _drawn_order() -> list[str]:
    """The names at the start of each line of the drawing, lowest package first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = re.search(r"### Packages\n.*?```\n(.*?)```", text, re.S)
    assert drawing is not None
    return [name for line in drawing[1].splitlines() for name in line.split("  ")[0].split(", ")]


def _imported(tree: ast.Module) -> Iterator[str]:
    """Packages of ours that a module imports anywhere, in functions and for types alone too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("torchkiln."))
        elif isinstance(node, ast.ImportFrom) and node.module == "torchkiln":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchkiln."):
            yield node.module.split(".")[1]


def _edges() -> set[tuple[str, str]]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts == ("__init__",):
            continue  # what users import: it names whatever they may call
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {(parts[0], imported) for imported in _imported(tree) if imported != parts[0]}
    return found


def test_every_package_is_drawn_once() -> None:
    present = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    order = _drawn_order()
    assert len(order) == len(set(order))
    assert set(order) == present - {"__init__", "__pycache__"}


def test_imports_follow_the_drawn_order() -> None:
    place = {name: k for k, name in enumerate(_drawn_order())}
    assert sorted((a, b) for a, b in _edges() if place[b] >= place[a]) == []
