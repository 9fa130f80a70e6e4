"""What TORCH_LOGS shows of a compilation, in processes of their own: torch reads it once."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchkiln.codegen import llvm
from torchkiln.logs import code_log, is_shown

_DECISIONS = """
import warnings
import torch
from torchkiln import compiler

def step(x, w):
    return (torch.softmax((x @ w).relu() * 2, -1) + 1).logcumsumexp(0)

x, w = torch.randn(5, 6, requires_grad=True), torch.randn(6, 7)
torch.compile(step, backend="kiln")(x, w).sum().backward()

def refuse(*given, **named):
    raise RuntimeError("refused on purpose\\nand more of it")

compiler.lower = refuse
warnings.simplefilter("ignore")
torch.compile(lambda x: x.cos(), backend="kiln")(torch.ones(3))
"""

_CODE = """
import logging, sys
import torch

def compiled(operator):
    torch._dynamo.reset()
    torch.compile(lambda x: operator(x) + 1, backend="kiln", options={"fallback": False})(torch.ones(3))

compiled(torch.sin)
torch._logging.set_logs(output_code=True)
print("asked for", file=sys.stderr)
compiled(torch.cos)
torch._logging.set_logs(modules={"torchkiln": logging.DEBUG})
print("no more", file=sys.stderr)
compiled(torch.tan)
"""


def _logged(program: str, folder: Path, torch_logs: str | None) -> str:
    path = folder / "program.py"
    path.write_text(program)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_LOGS", "KILN_"))}
    if torch_logs is not None:
        environment["TORCH_LOGS"] = torch_logs
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torch_logs_shows_stages_decisions_and_kernels(tmp_path: Path) -> None:
    text = _logged(_DECISIONS, tmp_path, "+torchkiln,kernel_code")
    for wanted in (
        r"pass \d+, pre_grad/normalize, changed the captured graph",
        r"forward saves \d+ values of \d+ bytes",
        r"logcumsumexp stays a call of aten.logcumsumexp.default: there is no lowering of it \(.*in step: .*cumsumexp",
        r"one kernel computes .*relu, .*_softmax",
        r"\[__kernel_code\] kernel0: cpu lanes \d+ .* rows i0 < 5",
        r"codegen: \d+\.\d+ s",
        r"forward graph of \d+ operations compiled: \d+ kernels, \d+ launches, \d+ extern calls",
        r"backward graph of \d+ operations compiled",
        r"the inference graph runs eagerly: lowering failed: RuntimeError: refused on purpose$",
    ):
        assert re.search(wanted, text, re.M), f"{wanted} in\n{text}"
    assert "define void @kernel0" not in text, "that is output_code, which was not asked for"
    assert "and more of it" not in text


def test_generated_code_is_shown_while_it_is_asked_for_and_no_longer(tmp_path: Path) -> None:
    before, _, rest = _logged(_CODE, tmp_path, None).partition("asked for\n")
    asked, _, after = rest.partition("no more\n")
    assert before == ""
    assert "[__output_code] define void @kernel0" in asked
    assert "graph of 2 operations compiled" not in asked
    assert "graph of 2 operations compiled" in after
    assert "__output_code" not in after


@pytest.mark.usefixtures("no_cache")  # code generation is watched
def test_without_a_wish_nothing_is_logged_and_no_text_is_made(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(llvm, "is_shown", lambda log: shown.append(is_shown(log)) or shown[-1])
    torch.compile(lambda x: x.sin() + 1, backend="kiln", options={"fallback": False})(torch.ones(3))
    assert shown == [False, False]
    assert [record for record in caplog.records if record.name.startswith("torchkiln")] == []


def test_an_artifact_that_torch_does_not_know_is_a_log_of_that_name() -> None:
    log = code_log("torchkiln.somewhere", "no_such_artifact")
    assert log is logging.getLogger("torchkiln.somewhere.no_such_artifact")
    assert not is_shown(log)


def test_every_log_is_named_by_its_module() -> None:
    source = Path(llvm.__file__).parents[2]
    for path in source.rglob("*.py"):
        for name in re.findall(r"^_log = logging\.getLogger\((.*)\)$", path.read_text(), re.M):
            assert name == "__name__", path
