"""A process that answers orders: each line of its standard input is a JSON object, and so is each answer.

``Process`` is the near side, ``serve`` the far one. A process that fails, dies or takes too long is an exception here.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from torchkiln.errors import first_line

# Seconds between two calls of what is done while waiting. To look at the memory of a process takes 0.4 ms, and 4 ms
# where it runs a compiler.
_LOOK = 0.2


class WorkerFailed(Exception):
    """A process did not get through; the message is one line."""


class Process:
    """One process; it is idle, blocked on its input, unless it was told to do something."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
        self._limit = limit
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def answer(self, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The next line the process writes; calls ``meanwhile`` every now and then until it is there."""
        assert self._process.stdout is not None
        end = time.monotonic() + self._limit
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            while not waiting.select(min(_LOOK, self._limit)):
                meanwhile()
                if time.monotonic() > end:
                    self._process.kill()
                    raise WorkerFailed(f"took more than {self._limit:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise WorkerFailed(f"ended with code {self._process.returncode}: {self._last_words()}")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WorkerFailed(f"answered with no JSON object: {line.strip()[:200]}") from None
        if "error" in found:
            raise WorkerFailed(found["error"])
        return found

    def ask(self, do: str, **given: object) -> dict[str, Any]:
        self._order(do, **given)
        return self.answer()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def _order(self, do: str, **given: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"ended early: {self._last_words()}") from None

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):  # an order that nobody was there to read
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "nothing on standard error"


def own_standard_output() -> TextIO:
    """Standard output for answers alone; all else that is printed, as compilers do now and then, goes to errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(known: Mapping[str, Callable[..., dict[str, Any]]], orders: Iterable[str], answers: TextIO) -> None:
    """Answer the lines of ``orders`` until they end; ``known`` are the orders by name."""
    for line in orders:
        order = json.loads(line)
        try:
            answer = known[order.pop("do")](**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {first_line(error)}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)
