"""What went wrong when a program was compiled and called, and whether it is the same failure as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.debug.check import DivergenceError, check
from torchkiln.debug.children import ask
from torchkiln.debug.runs import results_of
from torchkiln.errors import CompileError, first_line


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
            return [_kind(error), f"{type(error).__name__}: {first_line(error)}"]
        return None

    answer = ask(judge, timeout=timeout)
    if answer.ending == "answered":
        return None if answer.value is None else Failure(*answer.value)
    return Failure(f"{answer.ending}: {answer.text}", f"{answer.ending}: {answer.text}")


def _kind(error: Exception) -> str:
    if isinstance(error, DivergenceError):
        return error.divergence.kind
    if isinstance(error, CompileError):
        return f"{error.stage} {error.graph_pass or ''} {type(error.cause).__name__}"
    return type(error).__name__
