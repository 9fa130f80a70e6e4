"""The clean-room rule: no module of src imports the peer compiler, in any spelling."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "torchkiln"
FORBIDDEN = (
    "torch._inductor",
    "torch._functorch.partitioners",
    "torch._functorch.compilers",
    "torch._functorch.fx_minifier",
)


def _docstrings(tree: ast.Module) -> set[int]:
    """Ids of the constants that are docstrings: prose may name what code may not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def _dotted(node: ast.expr) -> str | None:
    """``a.b.c`` of an attribute chain on a plain name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _modules_named(source: str) -> Iterator[str]:
    """Every module an import, an attribute chain or a string of ``source`` may load."""
    tree = ast.parse(source)
    prose = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)):
            yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def _violations(source: str) -> list[str]:
    return [
        name
        for name in _modules_named(source)
        if any(name == module or name.startswith(module + ".") for module in FORBIDDEN)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor",
        "import torch._inductor.config as config",
        "from torch import _inductor",
        "from torch._inductor import lowering",
        "from torch._functorch import partitioners",
        "from torch._functorch.compilers import nop",
        "import torch\ntorch._inductor.config.debug = True",
        "importlib.import_module('torch._functorch.fx_minifier')",
        "def f():\n    __import__('torch._inductor.lowering')",
    ],
)
def test_the_walk_sees_every_spelling_of_a_forbidden_import(source: str) -> None:
    assert _violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._functorch.aot_autograd import aot_module_simplified",
        '"""Unlike torch._inductor, this module is small."""',
    ],
)
def test_the_walk_lets_other_imports_pass(source: str) -> None:
    assert not _violations(source)


def test_src_imports_nothing_of_the_peer_compiler() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    found = {str(path.relative_to(SOURCE)): names for path in files if (names := _violations(path.read_text()))}
    assert not found
