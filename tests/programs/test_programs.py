"""Random programs give compiled what they give in eager; one that does not becomes a small file that shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, settings

from tests.processes import environment
from tests.programs.campaign import run_block, table
from tests.programs.check import Different, check
from tests.programs.generate import programs
from tests.programs.program import Program, namespace
from torchkiln.lowering.registry import LOWERINGS

_SIN, _COS = torch.ops.aten.sin.default, torch.ops.aten.cos.default
_PLANT = f"""import torch
from torchkiln.lowering.registry import LOWERINGS
LOWERINGS[torch.ops.{_SIN}] = LOWERINGS[torch.ops.{_COS}]
"""


@pytest.mark.parametrize("block", range(6))
def test_random_programs_give_what_they_give_in_eager(block: int) -> None:
    # Far from the blocks `make programs` begins with: these are programs of their own.
    result = run_block(1_000_000 + block, 50)
    assert not result["complaints"], "\n".join(result["complaints"]) + "\n\n" + str(result["script"])
    assert result["verdicts"].get("same", 0) > 30
    modes = " ".join(key.split("|")[2] for key in result["covered"])
    assert all(mode in modes for mode in ("inference", "training", "static", "dynamic", "marked")), modes


@pytest.fixture
def planted_mistake() -> Iterator[None]:
    """sin is compiled as cos."""
    right = LOWERINGS[_SIN]
    LOWERINGS[_SIN] = LOWERINGS[_COS]
    yield
    LOWERINGS[_SIN] = right


def _smallest_failing() -> Different:
    failures: list[Different] = []

    def fails(program: Program | None) -> bool:
        # The mistake is known: programs without it need not be compiled to see that they agree.
        if program is None or not any(s.operator == "sin" for s in program.statements):
            return False
        try:
            check(program)
        except Different as different:
            failures.append(different)
            return True
        return False

    within = settings(max_examples=500, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
                      phases=[Phase.generate, Phase.shrink])  # fmt: skip
    find(programs(), fails, settings=within)
    return failures[-1]


def _run_alone(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(script)
    command, alone = [sys.executable, str(path)], environment(KILN_CACHE="0")
    return subprocess.run(command, capture_output=True, text=True, env=alone, cwd=folder, timeout=300, check=False)


@pytest.mark.usefixtures("no_cache")  # a stage is replaced
def test_a_mistake_shrinks_to_a_program_that_runs_on_its_own(planted_mistake: None, tmp_path: Path) -> None:
    found = _smallest_failing()
    script = found.script
    body = script.split("def program(")[1].split("return")[0].strip().splitlines()[1:]
    assert len(body) == 1, script
    assert ".sin()" in body[0]
    alone = _run_alone(_PLANT + script, tmp_path)
    assert alone.returncode == 1, alone.stderr
    assert "differs in" in alone.stdout
    right = _run_alone(script, tmp_path)
    assert (right.returncode, right.stdout) == (0, ""), right.stderr


def _program_of(statement_name: str, **wanted: object) -> Program:
    """Some program with a statement of that operator."""
    within = settings(max_examples=3000, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
                      phases=[Phase.generate])  # fmt: skip
    return find(
        programs(),
        lambda p: (
            p is not None
            and any(s.operator == statement_name for s in p.statements)
            and all(getattr(p, key) == value for key, value in wanted.items())
        ),
        settings=within,
    )


def test_the_text_of_a_program_is_the_program() -> None:
    program = _program_of("softmax")
    script = namespace(program.script([{} for _ in program.sizes]), __name__="printed")
    defined = namespace(program.source())
    for sizes in program.sizes:
        (arguments, _), (others, _) = script["inputs"](*sizes), defined["inputs"](*sizes)
        assert all(torch.equal(a, b) for a, b in zip(arguments, others, strict=True))
        for a, b in zip(script["program"](*arguments), defined["program"](*others), strict=True):
            assert torch.equal(a, b)


def test_the_table_counts_what_was_covered() -> None:
    results = [
        {"verdicts": {"same": 2}, "covered": {"add|float32|training static": 3}},
        {"verdicts": {"same": 1, "torch": 1}, "covered": {"add|int64|inference static": 1}},
    ]
    lines = table(results).splitlines()
    assert lines[0].split() == ["operator", "float32", "int64", "inference", "static", "training", "static"]
    assert lines[1].split() == ["add", "3", "1", "1", "3"]
    assert lines[-1] == "4 programs: 3 same, 1 torch"
