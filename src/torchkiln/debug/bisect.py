"""Bisect: the single pass, rewrite, fusion or compiled operator that turns a right result wrong.

Actions of a compilation are numbered (``torchkiln.actions``). Each trial compiles with lower limits in a child process,
and halving finds the first action with which the check fails.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchkiln.actions import LIMITS, Action, ActionKind
from torchkiln.config import environment_name
from torchkiln.debug.check import NondeterministicError, check
from torchkiln.debug.children import ask, import_compiler
from torchkiln.debug.failure import kind_of
from torchkiln.errors import UnsupportedError, first_line
from torchkiln.recorder import Record, number_from_one, observe
from torchkiln.scripts import execute_script

Limits = Mapping[str, int]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One run under limits: ``failure`` is empty where the check passed. ``actions`` are those it took.

    ``kind`` must be the same for a failure to be the same.
    """

    limits: Limits
    failure: str
    kind: str
    actions: tuple[Action, ...]

    @property
    def failed(self) -> bool:
        return bool(self.failure)

    def __str__(self) -> str:
        limited = ", ".join(f"{name}={limit}" for name, limit in self.limits.items()) or "no limits"
        return f"{limited}: {self.failure or 'passes'}"


@dataclass(frozen=True)
class BisectReport:
    """What bisection found: ``action`` is the first one with which the check fails, None where none is to blame.

    ``within`` is the pass in which a rewrite was applied. ``conclusion`` says it in a sentence, ``limits`` are the
    settings under which the check fails, with ``action`` the last of its kind.
    """

    conclusion: str
    failure: str
    action: Action | None
    within: Action | None
    limits: Limits
    trials: int

    def __str__(self) -> str:
        lines = [self.conclusion]
        if self.action is not None:
            lines.append(f"  {self.action}")
        if self.within is not None:
            lines.append(f"  in {self.within}")
        if self.failure:
            lines.append(f"  {self.failure}")
        if self.limits:
            variables = " ".join(f"{environment_name(name)}={limit}" for name, limit in self.limits.items())
            lines.append(f"  fails with {variables}")
        return "\n".join([*lines, f"  {self.trials} runs"])


def bisect(
    function: Callable[..., Any], /, *args: Any, dynamic: bool = False, say: Say | None = None, **kwargs: Any
) -> BisectReport:
    """Find the action that makes ``function`` worse than eager, by outputs and gradients as :func:`shadow` judges them.

    Every trial is a fork of this process, on one thread, so that a crash is an answer; ``say`` is told of each.
    """
    return find_action(lambda: check(function, args, kwargs, dynamic=dynamic), say=say)


def bisect_script(
    script: Path, arguments: Sequence[str] = (), *, say: Say | None = None, timeout: float = 600.0
) -> BisectReport:
    """Find the action that makes a script fail: by its exit code, an exception, a signal or a hang.

    Settings come by the environment, so options that the script gives itself stay. Where it passes because a graph
    that cannot be compiled runs eagerly, it is tried without that.
    """
    if not script.is_file():
        raise UnsupportedError(f"There is no script {script}; give the path of a Python file.")
    question = _script_runner(script, arguments)
    found = find_action(question, say=say, timeout=timeout)
    if found.failure or "KILN_FALLBACK" in os.environ:
        return found
    with _variables({"KILN_FALLBACK": "0"}):
        return find_action(question, say=say, timeout=timeout)


def find_action(question: Callable[[], None], *, say: Say | None = None, timeout: float = 600.0) -> BisectReport:
    """Find the action without which ``question`` does not raise, exit with an error or die."""
    import_compiler()
    return _Bisection(question, say or (lambda _: None), timeout).report()


class _Bisection:
    def __init__(self, question: Callable[[], None], say: Say, timeout: float) -> None:
        self._question, self._say, self._timeout = question, say, timeout
        self._trials = 0
        self._kind = ""

    def report(self) -> BisectReport:
        full = self._try({})
        if not full.failed:
            return self._found("The check passes: there is nothing to find.", full)
        self._kind = full.kind
        if full.kind == NondeterministicError.__name__:
            return self._found("Nothing can be judged: eager does not give the same results twice.", full)
        # Limits that leave everything out, one kind after the other, until the failure is gone.
        failing = full
        for kind in ("compilation", "pass", "fusion", "call"):
            without = self._try({**failing.limits, LIMITS[kind]: 0})
            if self._same(without):
                if kind == "compilation":
                    return self._found("It fails without torchkiln: the program or its capture is to blame.", without)
                failing = without
                continue
            failing = self._halve(kind, 0, failing)
            if kind == "compilation":
                continue
            return self._blame(kind, failing)
        return self._found("No pass, fusion or operator is to blame: look at required passes and the call.", failing)

    def _blame(self, kind: ActionKind, failing: Trial) -> BisectReport:
        action = _numbered(failing, kind)
        if kind != "pass" or action is None:
            return self._found(f"The {kind} that turns the result wrong:", failing, action)
        rewrites = _rewrites_in(failing, action)
        if rewrites:
            before = rewrites[0].number - 1
            without = self._try({**failing.limits, LIMITS["rewrite"]: before})
            if not self._same(without):
                narrowed = self._halve("rewrite", before, failing)
                rewrite = _numbered(narrowed, "rewrite")
                return self._found("The rewrite that turns the result wrong:", narrowed, rewrite, action)
        return self._found("The pass that turns the result wrong:", failing, action)

    def _halve(self, kind: ActionKind, passes: int, failing: Trial) -> Trial:
        """The failing trial with the lowest limit for ``kind``; with ``passes`` as limit the check passes."""
        fails = max((action.number for action in failing.actions if action.kind == kind), default=passes)
        limited = failing
        while fails - passes > 1:
            middle = (passes + fails) // 2
            trial = self._try({**failing.limits, LIMITS[kind]: middle})
            if self._same(trial):
                fails, limited = middle, trial
            else:
                passes = middle
        only_one = kind == "compilation" and limited is failing  # a limit would change nothing
        if only_one or limited.limits.get(LIMITS[kind]) == fails:
            return limited
        return self._try({**failing.limits, LIMITS[kind]: fails})

    def _same(self, trial: Trial) -> bool:
        """Whether a trial fails as the first one did: another failure is another bug, or one of the limits."""
        return trial.failed and trial.kind == self._kind

    def _try(self, limits: Limits) -> Trial:
        self._trials += 1
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "actions"
            answer = ask(lambda: _observed(self._question, limits, log), timeout=self._timeout)
            written = log.read_text().splitlines() if log.exists() else []
        actions = tuple(Action(**json.loads(line)) for line in written)
        if answer.ending == "answered":
            kind, failure = answer.value or ("", "")
        else:
            failure = f"{answer.ending}: {answer.text}"
            kind = failure
        trial = Trial(limits, failure, kind, actions)
        self._say(f"run {self._trials}, {trial}")
        return trial

    def _found(
        self, conclusion: str, trial: Trial, action: Action | None = None, within: Action | None = None
    ) -> BisectReport:
        return BisectReport(conclusion, trial.failure, action, within, trial.limits, self._trials)


def _numbered(trial: Trial, kind: ActionKind) -> Action | None:
    """The action at the limit, in the last compilation that got so far."""
    limit = trial.limits[LIMITS[kind]]
    return next((a for a in reversed(trial.actions) if a.kind == kind and a.number == limit), None)


def _rewrites_in(trial: Trial, graph_pass: Action) -> list[Action]:
    """What one pass rewrote."""
    found: list[Action] = []
    inside = False
    for action in trial.actions:
        if action.kind == "pass":
            inside = action == graph_pass
        elif inside and action.kind == "rewrite":
            found.append(action)
    return found


def _observed(question: Callable[[], None], limits: Limits, log: Path) -> tuple[str, str] | None:
    """Ask under ``limits``, in a process of its own; every action is written to ``log`` before it is taken.

    The kind of a failure, and what to say of it.
    """
    limited = {environment_name(name): str(limit) for name, limit in limits.items()}
    os.environ.update({"KILN_CACHE": "0", "KILN_ADAPTIVE": "0", **limited})
    number_from_one()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(record: Record) -> None:
        if isinstance(record.value, Action):
            os.write(file, f"{json.dumps(asdict(record.value))}\n".encode())

    with observe(write):
        try:
            question()
        except _ExitError as end:
            return f"exit code {end.code}", str(end)
        except Exception as error:
            return _kind_of(error), f"raised: {type(error).__name__}: {first_line(error)}"
    return None


def _kind_of(error: Exception) -> str:
    """As :func:`kind_of`, but wrong numbers are one failure: which of them are finite may depend on what a limit leaves
    out, or on memory that nobody wrote."""
    kind = kind_of(error)
    return "wrong numbers" if kind in ("wrong result", "non-finite") else kind


class _ExitError(Exception):
    """A script that ended with an exit code, or with a message, which is exit code 1."""

    def __init__(self, given: object) -> None:
        self.code = given if isinstance(given, int) else 1
        said = "" if isinstance(given, int) else f": {given}"
        super().__init__(f"exit code {self.code}{said}")


def _script_runner(script: Path, arguments: Sequence[str]) -> Callable[[], None]:
    def run() -> None:
        try:
            execute_script(script, arguments)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise _ExitError(end.code) from None

    return run


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
