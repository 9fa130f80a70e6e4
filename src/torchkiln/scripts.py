"""Running a script of the user's in this process, as ``python SCRIPT ARGUMENTS`` does."""

from __future__ import annotations

import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures.thread import _threads_queues
from dataclasses import dataclass
from pathlib import Path

_INTERRUPTED = 130  # what a shell says of a process that SIGINT ended


@dataclass(frozen=True)
class ScriptEnd:
    """How a script ended: its exit code, and whether it ``raised`` something or was interrupted."""

    code: int
    raised: bool = False


def run_script(script: Path, arguments: Sequence[str]) -> ScriptEnd:
    """Run it to its end, its exit or Ctrl-C; the traceback of what it raises is printed."""
    try:
        execute_script(script, arguments)
    except SystemExit as ended:
        return ScriptEnd(_exit_code(ended.code))
    except Exception:
        traceback.print_exc()
        return ScriptEnd(1, raised=True)
    except KeyboardInterrupt:
        traceback.print_exc()
        return ScriptEnd(_INTERRUPTED, raised=True)
    return ScriptEnd(0)


def _exit_code(given: str | int | None) -> int:
    """That of ``sys.exit(given)``, which prints what is no number."""
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1


def execute_script(script: Path, arguments: Sequence[str]) -> None:
    """Run it with arguments and the first folder of imports as ``python SCRIPT ARGUMENTS`` has them; it may raise.

    Threads that it started have ended then, but for daemons.
    """
    typed, folders, others = sys.argv, sys.path, set(threading.enumerate())
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            _join_threads(others)
    finally:
        sys.argv, sys.path = typed, folders


def _join_threads(others: set[threading.Thread]) -> None:
    """Wait for the threads that are none of the ``others``, and for those that they start, as Python does at its end.

    Threads of an executor wait for work until the process ends.
    """
    while True:
        left = [t for t in threading.enumerate() if not (t.daemon or t in others or t in _threads_queues)]
        if not left:
            return
        left[0].join()
