"""Forked child processes that answer a question: a crash, a hang and an exception are answers too."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NoReturn

import torch
import torch.fx

from torchkiln.config import Settings
from torchkiln.errors import UnsupportedError, first_line

_NO_BACKWARD = "Unable to handle autograd's threading in combination with fork"  # how torch's message begins
Ending = Literal["answered", "raised", "died", "timed out"]


@dataclass(frozen=True)
class Answer:
    """How a child ended: with a ``value``, an exception, a signal, or not in time; ``text`` says which."""

    ending: Ending
    value: Any = None
    text: str = ""


def ask(question: Callable[[], Any], *, timeout: float = 600.0, quiet: bool = True) -> Answer:
    """Call ``question`` in a fork of this process, on one thread; its answer must be what JSON holds.

    What it prints is dropped where it is to be ``quiet``. Raises UnsupportedError where torch refuses ``question`` the
    backward pass because this process has run one: a torch built for GPUs starts threads for it, which forks lack.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(question, writing, quiet)
    os.close(writing)
    try:
        written = _read(reading, time.monotonic() + timeout)
    except BaseException:  # such as an interrupt: nobody waits for the child any more
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        if sys.exc_info()[0] is not None:
            os.waitpid(child, 0)
    if written is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Answer("timed out", text=f"no answer in {timeout:.0f} s")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Answer("died", text=signal.Signals(os.WTERMSIG(status)).name)
    if not written:
        return Answer("died", text=f"exit code {os.waitstatus_to_exitcode(status)}")
    ending, value, text = json.loads(written)
    if _NO_BACKWARD in text:
        raise UnsupportedError(
            "This process has run a backward pass with a torch that is built for GPUs, and its children cannot run one;"
            " put the program into a script and give it to: kiln bisect, or kiln minify."
        )
    return Answer(ending, value, text)


@cache
def import_compiler() -> None:
    """Load what a compilation imports, so that not every child does: 0.9 s of a trial that takes 1.2 s.

    It is loaded by a compilation, which a child makes first: where that crashes, children do the import.
    """
    if ask(_compile_something).ending == "answered":
        _compile_something()


def _compile_something() -> None:
    """In inference: a process that runs a backward pass may have children that cannot (see :func:`ask`)."""
    from torchkiln.compiler import compile_fx

    graph = torch.fx.symbolic_trace(lambda x: (torch.tanh(x),))
    x = torch.ones(2)
    settings = Settings(fallback=True, adaptive=False, cache=False)
    compile_fx(graph, [x], settings=settings)(x)
    torch.compile(torch.tanh, backend="eager")(x)


def _answer(question: Callable[[], Any], writing: int, quiet: bool) -> NoReturn:
    try:
        faulthandler.disable()
        if quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        # A pool of threads does not live on in a fork.
        torch.set_num_threads(1)
        try:
            answer = ["answered", question(), ""]
        except BaseException as error:
            if not quiet:
                traceback.print_exc()
            answer = ["raised", type(error).__name__, f"{type(error).__name__}: {first_line(error)}"]
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _read(pipe: int, until: float) -> bytes | None:
    """All that is written to ``pipe`` until it is closed; None where that takes too long."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
