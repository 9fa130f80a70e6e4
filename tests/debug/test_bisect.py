"""Bisection names the one pass, rewrite, fusion or operator that turns a right result wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import torchkiln
from tests.debug import nondeterministic
from tests.debug.planted import plant
from tests.debug.seeded import SEEDED, SEEDED_STRIDES, inputs
from torchkiln.cli import app
from torchkiln.debug import bisect, bisect_script
from torchkiln.debug.accuracy import Divergence, DivergenceKind
from torchkiln.debug.bisect import find_action
from torchkiln.debug.check import DivergenceError

BUGS = SEEDED | {"strides_in_joint_pass": SEEDED_STRIDES["strides_in_joint_pass"]}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_named(name: str) -> None:
    seeded = BUGS[name]
    undo = plant(name)
    try:
        report = bisect(seeded.program, *inputs())
    finally:
        undo()
    assert report.action is not None, str(report)
    assert report.action.kind == seeded.action[0]
    assert report.action.name.startswith(seeded.action[1])
    assert seeded.failure in report.failure


def test_a_program_that_is_right_has_nothing_to_find() -> None:
    report = bisect(SEEDED["nan"].program, *inputs())
    assert report.action is None
    assert not report.failure
    assert report.trials == 1


def test_of_several_rewrites_by_one_pass_the_wrong_one_is_named() -> None:
    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4, 8),))
    class OnlyWideOnes:
        def search(x):
            return torch.tanh(x)

        def replace(x):
            return torch.tanh(x) * (1.0 if x.shape[-1] < 32 else 1.5)

    def program(x: torch.Tensor) -> torch.Tensor:
        narrow = torch.tanh(x + 1).sum()
        wide = torch.tanh(torch.cat([x, x], -1))
        return narrow + wide.sum() + torch.tanh(x + 2).sum()

    try:
        report = bisect(program, torch.randn(4, 16))
    finally:
        OnlyWideOnes.unregister()
    assert report.action is not None
    assert (report.action.kind, report.action.name) == ("rewrite", "OnlyWideOnes at tanh_1")
    assert report.within is not None
    assert report.within.name == "joint/OnlyWideOnes"
    assert "test_bisect.py" in str(report.action.source)
    assert "torch.tanh(torch.cat" in str(report.action.source)


def test_the_graph_of_several_is_found_in_a_script_by_its_own_check(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "from tests.debug.planted import plant\n"
        "plant('wrong_constant')\n"
        "for f in (torch.sin, torch.exp, torch.cos):\n"
        "    x = torch.linspace(-1, 1, 50)\n"
        "    torch._dynamo.reset()\n"
        "    y = torch.compile(lambda x, f=f: f(x) * 2, backend='kiln')(x)\n"
        "    if not torch.allclose(y, f(x) * 2, rtol=1e-6):\n"
        "        sys.exit(3)\n"
    )
    result = CliRunner().invoke(app, ["bisect", str(script)])
    assert result.exit_code == 0, result.output
    assert "call 1, aten.exp.default at exp" in result.output
    assert "exit code 3" in result.output
    assert "KILN_CALLS_LIMIT=1" in result.output


def test_a_script_that_passes_ends_with_exit_code_1(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('fine')\n")
    result = CliRunner().invoke(app, ["bisect", str(script)])
    assert result.exit_code == 1
    assert "nothing to find" in result.output


def test_another_exit_code_is_another_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "import torch\n"
        "from tests.debug.planted import plant\n"
        "plant('wrong_constant')\n"
        "if os.environ.get('KILN_COMPILATIONS_LIMIT') == '0':\n"
        "    sys.exit(4)\n"
        "x = torch.linspace(-1, 1, 50)\n"
        "y = torch.compile(lambda x: torch.exp(x) * 2, backend='kiln')(x)\n"
        "sys.exit(0 if torch.allclose(y, torch.exp(x) * 2, rtol=1e-6) else 3)\n"
    )
    report = bisect_script(script)
    assert report.action is not None, str(report)
    assert report.action.name.startswith("aten.exp.default at exp")
    assert report.failure == "exit code 3"


@pytest.mark.parametrize(
    ("full", "limited", "same"),
    [
        ("wrong result", "other strides", False),
        ("non-finite", "other metadata", False),
        ("wrong result", "non-finite", True),
        ("non-finite", "wrong result", True),
    ],
)
def test_another_way_to_diverge_is_another_failure_unless_numbers_are_wrong(
    full: DivergenceKind, limited: DivergenceKind, same: bool
) -> None:
    def question() -> None:
        kind = limited if os.environ.get("KILN_COMPILATIONS_LIMIT") == "0" else full
        raise DivergenceError(Divergence("output 0", kind, "planted"))

    told: list[str] = []
    report = find_action(question, say=told.append)
    assert any(limited in line for line in told)
    assert (limited if same else full) in report.failure
    assert ("It fails without torchkiln" in report.conclusion) == same


def test_nothing_is_judged_where_eager_differs_from_itself() -> None:
    report = bisect(nondeterministic.counted_up, torch.randn(4))
    assert report.conclusion == "Nothing can be judged: eager does not give the same results twice."
    assert "eager differs from itself, first at node" in report.failure
    assert report.action is None
    assert report.trials == 1
