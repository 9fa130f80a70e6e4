"""What went wrong when a program was compiled and called, and whether it is the same failure as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed

from torchkiln.debug.check import DivergenceError, check
from torchkiln.debug.children import ask
from torchkiln.debug.runs import results_of
from torchkiln.errors import CompileError, first_line

HANG = "timed out"
# Lines that a file prints: before it compiles anything, and the kind of the failure.
STARTED, SAID = "torchkiln: compiling, and comparing with eager", "torchkiln: the failure is of kind "


@dataclass(frozen=True)
class Failure:
    """``kind`` must stay the same while a program is made smaller; ``text`` is for people."""

    kind: str
    text: str


def failure_of(
    program: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    dynamic: bool | None = False,
    slower: float | None = None,
    timeout: float = 600.0,
) -> Failure | None:
    """How ``program`` fails in a child process; None where it does not, or does so in eager too."""

    def judge() -> list[str] | None:
        torch._dynamo.reset()
        try:
            results_of(program, inputs)
        except Exception:  # no program at all
            return None
        try:
            check(program, inputs, dynamic=dynamic, slower=slower)
        except Exception as error:
            return [kind_of(error), f"{type(error).__name__}: {first_line(error)}"]
        return None

    answer = ask(judge, timeout=timeout)
    if answer.ending == "answered":
        return None if answer.value is None else Failure(*answer.value)
    text = f"{answer.ending}: {answer.text}"
    return Failure(HANG if answer.ending == "timed out" else text, text)


def failure_of_file(file: Path, *, timeout: float) -> str | None:
    """The kind of failure that a file written by torchkiln ends with in a process of its own.

    None where it passes, or ends before it compiles anything, as with a setup that raises.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory() as nowhere, (Path(nowhere) / "out").open("w+") as out:
        command = [sys.executable, str(file.resolve())]
        process = subprocess.Popen(command, cwd=nowhere, env=environment, stdout=out, stderr=subprocess.DEVNULL)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        lines = out.read().splitlines()
    if STARTED not in lines or code == 0:
        return None
    if code is None:
        return HANG
    said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    if said:
        return said[-1]
    return f"died: {signal.Signals(-code).name}" if code < 0 else f"died: exit code {code}"


def kind_of(error: Exception) -> str:
    """What must be the same of two exceptions for them to be one failure."""
    if isinstance(error, BackendCompilerFailed):
        return kind_of(error.inner_exception)
    if isinstance(error, DivergenceError):
        return error.divergence.kind
    if isinstance(error, CompileError):
        return f"{error.stage} {error.graph_pass or ''} {type(error.cause).__name__}"
    return type(error).__name__
