"""Digests of code: every change that a result may depend on is seen, and nothing else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

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
    ],
    ids=["itself", "what it calls", "what that calls", "a constant", "a set", "an operator", "a method"],
)
def test_a_change_in_what_a_function_calls_by_name_is_seen(before: str, after: str) -> None:
    assert digest_of(changed(before, after)) != digest_of(PROGRAM)


@pytest.mark.parametrize(
    ("before", "after"), [("x - 1", "x - 2"), ("SEEN = []", "SEEN = [1]")], ids=["unrelated function", "state"]
)
def test_what_a_function_does_not_depend_on_is_not_seen(before: str, after: str) -> None:
    assert digest_of(changed(before, after)) == digest_of(PROGRAM)


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
    monkeypatch.setattr(fingerprints, "files", lambda _: copies)
    prints = [before]
    changes = (("graph/strides.py", "LIMIT = 1\n"), ("graph/strides.py", "LIMIT = 2\n"), ("stored.txt", "other\n"))
    for path, content in changes:
        (copies / path).write_text(content)
        package_digest.cache_clear()
        prints.append(built_in.fingerprint())
    monkeypatch.undo()
    package_digest.cache_clear()
    assert len(set(prints)) == 4
    assert built_in.fingerprint() == before


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
