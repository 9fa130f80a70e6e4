"""Running a script of the user's in this process, as ``python SCRIPT ARGUMENTS`` does."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def run_script(script: Path, arguments: Sequence[str]) -> bool:
    """Run it to its end or exit, whatever its code; False where it raised something, whose traceback is printed."""
    with _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            return True
        except Exception:
            traceback.print_exc()
            return False
    return True


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Arguments and the first folder of imports as ``python SCRIPT ARGUMENTS`` has them."""
    typed, folders = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = typed, folders
