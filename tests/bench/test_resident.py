"""Memory of a process and of those it starts: all of it counts, and what they share counts once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchkiln.bench.resident import tree_mib

MIB = 64
# Each says that it holds its memory, and then waits for its input to end.
_HOLD = f"held = bytearray(b'x') * ({MIB} << 20); print('ready', flush=True); sys.stdin.read()"
_ALONE = f"import sys; {_HOLD}"
_IN_A_GRANDCHILD = f"""
import subprocess, sys
grandchild = "import sys; {_HOLD}"
child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {{grandchild!r}}])"
subprocess.run([sys.executable, "-c", child])
"""
_IN_BOTH = f"""
import subprocess, sys
held = bytearray(b"x") * ({MIB} << 20)
subprocess.run([sys.executable, "-c", "import sys; {_HOLD}"])
"""
_SHARED_BY_FORKS = f"""
import os, sys
held = bytearray(b"x") * ({MIB} << 20)
for _ in range(3):
    if not os.fork():
        sys.stdin.read()
        os._exit(0)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def _running(program: str) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def test_a_process_that_starts_no_other_is_left_to_the_peak_that_the_system_keeps() -> None:
    with _running(_ALONE) as process:
        assert tree_mib(process) == 0
    assert tree_mib(process) == 0  # it has ended


def test_memory_of_descendants_counts() -> None:
    with _running(_IN_A_GRANDCHILD) as process:
        assert MIB + 10 < tree_mib(process) < MIB + 80  # three interpreters


def test_memory_of_the_process_itself_counts_beside_that_of_the_others() -> None:
    with _running(_IN_BOTH) as process:
        assert 2 * MIB < tree_mib(process) < 2 * MIB + 60


def test_what_several_hold_counts_once() -> None:
    with _running(_SHARED_BY_FORKS) as process:
        assert MIB < tree_mib(process) < MIB + 60  # not 4 * MIB


def test_one_that_ends_while_it_is_looked_at_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []

    def listed(folder: str) -> list[str]:
        gone.append(folder)
        raise FileNotFoundError(folder)

    monkeypatch.setattr("torchkiln.bench.resident.os.listdir", listed)
    assert tree_mib(os.getpid()) == 0
    assert gone == [f"/proc/{os.getpid()}/task"]
