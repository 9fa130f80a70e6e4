"""Digests of code: every change that a result may depend on is seen, and nothing else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.fx

from torchkiln.graph import fingerprints
from torchkiln.graph.fingerprints import function_digest, package_digest
from torchkiln.graph.manager import Pass
from torchkiln.passes import all_pipelines

PROGRAM = """
import torch

FACTOR = 2.0
NAMES = frozenset({"alpha", "beta", "gamma"})
SEEN = []
operator = torch.ops.aten.sin.default

class Options:
    limit = 3

    def __init__(self, most):
        self.most = most

OPTIONS = Options(7)

class Finder:
    def wanted(self, node):
        return node.target is operator

def scaled(x):
    return x * FACTOR

def helper(x):
    return scaled(x) + 1

def unrelated(x):
    return x - 1

def run(graph_module):
    SEEN.append(graph_module)
    if len(graph_module.graph.nodes) > OPTIONS.most:
        return False
    return [helper(node) for node in graph_module.graph.nodes if Finder().wanted(node) and node.name in NAMES] == [5]
"""


def digest_of(source: str, name: str = "run") -> str:
    space: dict[str, Any] = {"__name__": "user_program"}
    exec(compile(source, "user_program", "exec"), space)
    return function_digest(space[name])


def changed(before: str, after: str) -> str:
    assert before in PROGRAM
    return PROGRAM.replace(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("== [5]", "== [6]"),
        ("scaled(x) + 1", "scaled(x) + 2"),
        ("x * FACTOR", "x / FACTOR"),
        ("FACTOR = 2.0", "FACTOR = 3.0"),
        ('"gamma"', '"delta"'),
        ("sin.default", "cos.default"),
        ("node.target is operator", "node.target is not operator"),
        ("SEEN = []", "SEEN = [1]"),
        ("limit = 3", "limit = 4"),
        ("self.most = most", "self.most = most + 1"),
        ("Options(7)", "Options(8)"),
    ],
    ids=[
        *("itself", "what it calls", "what that calls", "a constant", "a set", "an operator", "a method", "a list"),
        *("an attribute of a class", "what sets an attribute", "an object"),
    ],
)
def test_a_change_in_what_a_function_calls_by_name_is_seen(before: str, after: str) -> None:
    assert digest_of(changed(before, after)) != digest_of(PROGRAM)


def test_what_a_function_does_not_depend_on_is_not_seen() -> None:
    assert digest_of(changed("x - 1", "x - 2")) == digest_of(PROGRAM)


def test_graphs_that_a_pass_keeps_are_no_part_of_it() -> None:
    space: dict[str, Any] = {"__name__": "user_program"}
    exec(compile(PROGRAM, "user_program", "exec"), space)
    before = function_digest(space["run"])
    graph = torch.fx.Graph()
    space["SEEN"] += [graph, graph.placeholder("x")]
    assert function_digest(space["run"]) == before
    space["SEEN"].append(2)
    assert function_digest(space["run"]) != before


class _Scale:
    def __init__(self, factor: object) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


@pytest.mark.parametrize(
    "made",
    [
        _Scale,
        lambda factor: _Scale(factor).__call__,
        lambda factor: partial(_Scale.__call__, _Scale(factor)),
        lambda factor: (lambda scale: lambda x: scale(x))(_Scale(factor)),
        lambda factor: _Scale([{"by": factor}]),
        lambda factor: _Scale(torch.tensor(factor)),
        lambda factor: _Scale(torch.tensor([[1.0, factor]])),
    ],
    ids=["an object", "a method", "a partial", "a closure", "containers", "a number as a tensor", "a tensor"],
)
def test_the_state_of_objects_is_part_of_what_they_do(made: Callable[[float], Any]) -> None:
    assert function_digest(made(2.0)) == function_digest(made(2.0)) != function_digest(made(3.0))


def test_an_object_that_holds_itself_has_a_digest() -> None:
    scale = _Scale(2.0)
    scale.factor = [scale]
    assert function_digest(scale) == function_digest(scale)


def test_functions_in_other_modules_of_the_user_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for answer in (1, 2, 1):
        module = ModuleType("users_other_module")
        exec(f"LIMIT = {answer}\ndef decide(x):\n    return x > LIMIT", vars(module))
        monkeypatch.setitem(sys.modules, "users_other_module", module)
        digests.append(digest_of("import users_other_module\n\ndef run(x):\n    return users_other_module.decide(x)"))
    assert digests[0] == digests[2] != digests[1]


def test_functions_that_call_each_other_have_digests() -> None:
    program = "def run(x): return other(x)\ndef other(x): return run(x) if x else 1"
    assert digest_of(program) == digest_of(program)
    assert digest_of(program) != digest_of(program.replace("else 1", "else 2"))


def test_functions_in_other_modules_of_the_same_package_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "passes.py").write_text("from users_package import parts\n\ndef run(gm):\n    return parts.decide(gm)\n")
    digests = []
    for answer in ("True", "False", "True"):
        for name in [name for name in sys.modules if name.startswith("users_package")]:
            monkeypatch.delitem(sys.modules, name)
        space: dict[str, Any] = {}
        (package / "parts.py").write_text("")
        exec("import users_package.passes as found", space)
        exec(f"def decide(gm):\n    return {answer}\n", vars(sys.modules["users_package.parts"]))
        digests.append(function_digest(space["found"].run))
    assert digests[0] == digests[2] != digests[1]


def test_a_closure_over_another_operator_is_another_function() -> None:
    def made(operator: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: operator(x)

    digests = {function_digest(made(operator)) for operator in (torch.ops.aten.sin.default, torch.ops.aten.cos.default)}
    assert len(digests) == 2


@pytest.mark.parametrize(
    "reads", [lambda: os.environ["KILN_TESTS"], lambda: os.environ.get("KILN_TESTS"), lambda: os.getenv("KILN_TESTS")]
)
def test_variables_of_the_environment_are_part_of_what_reads_them(
    reads: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILN_TESTS", "1")
    first = function_digest(reads)
    monkeypatch.setenv("KILN_TESTS_OTHER", "1")
    assert function_digest(reads) == first
    monkeypatch.setenv("KILN_TESTS", "2")
    assert function_digest(reads) != first


def test_arguments_bound_by_a_partial_are_part_of_the_function() -> None:
    def scaled(x: float, factor: float, function: object = None) -> float:
        return x * factor

    bound = [
        partial(scaled, factor=2.0),
        partial(scaled, factor=3.0),
        partial(scaled, 2.0),
        partial(scaled, function=math.sin),
        partial(scaled, function=math.cos),
        partial(partial(scaled, 2.0), factor=2.0),
    ]
    assert len({function_digest(function) for function in bound}) == len(bound)
    assert function_digest(partial(scaled, factor=2.0)) == function_digest(bound[0])


def test_every_built_in_pass_depends_on_every_file_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_in = next(item for item in all_pipelines()[1].passes if isinstance(item, Pass))
    before = built_in.fingerprint()
    copies = tmp_path / "torchkiln"
    (copies / "graph").mkdir(parents=True)
    (copies / "graph" / "strides.py").write_text("LIMIT = 1\n")
    (copies / "stored.txt").write_text("pattern\n")
    (copies / "times.csv").write_text("1\n")
    monkeypatch.setattr(fingerprints, "files", lambda _: copies)
    prints = [before]
    changes = (
        *(("graph/strides.py", "LIMIT = 1\n"), ("graph/strides.py", "LIMIT = 2\n")),
        *(("stored.txt", "other\n"), ("times.csv", "2\n")),
    )
    for path, content in changes:
        (copies / path).write_text(content)
        package_digest.cache_clear()
        prints.append(built_in.fingerprint())
    monkeypatch.undo()
    package_digest.cache_clear()
    assert len(set(prints)) == 1 + len(changes)
    assert built_in.fingerprint() == before


def test_files_that_no_digest_has_are_pages_for_a_reader() -> None:
    package = Path(fingerprints.__file__).parents[1]
    kinds = {path.suffix for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    of_pages = {".html", ".js", ".css", ".sha256", ".md", ".typed", ""}
    assert kinds - set(fingerprints.SHAPE_RESULTS) <= of_pages


def test_digests_are_the_same_in_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    printing = "from torchkiln.graph.fingerprints import function_digest\nprint(function_digest(run))\n"
    script.write_text(f"{PROGRAM}\n{printing}")
    source = str(Path(fingerprints.__file__).parents[2])
    printed = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(script)]
        printed.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert len(printed) == 1
