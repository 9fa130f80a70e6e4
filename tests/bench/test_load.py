"""How busy the machine is: what others take of the processors, by the system's counts, and what of it is ours."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchkiln.bench import load
from torchkiln.bench.load import Load, LoadWatch, summary


class System:
    """A machine of three processors, of which two may be used, with counts that a test sets."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def says(self, stolen: int, idle: int, ours: int, child: int) -> None:
        # user nice system idle iowait irq softirq steal guest guest_nice
        lines = [
            "cpu  1 1 1 1 1 1 1 1 1 1",
            f"cpu0 {ours + child} 0 0 {idle} 5 0 0 {stolen} 7 7",
            f"cpu1 0 0 0 {2 * idle} 0 0 0 0 0 0",
            "cpu2 999999 0 0 0 0 0 0 0 0 0",
            "intr 12345 0",
        ]
        (self.root / "stat").write_text("\n".join(lines) + "\n")
        for process, ticks in ((os.getpid(), ours), (7, child)):
            folder = self.root / str(process)
            folder.mkdir(exist_ok=True)
            # The name of a program may have spaces and brackets in it.
            (folder / "stat").write_text(f"{process} (a ) b (c) S 1 2 3 4 5 6 7 8 9 10 {ticks} 0 0 0 20 0 1\n")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    monkeypatch.setattr(load, "_PROC", tmp_path)
    monkeypatch.setattr(load, "descendants", lambda root: iter([7, 8]))  # 8 has just ended
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    return System(tmp_path)


def test_others_take_what_is_neither_idle_nor_ours(system: System) -> None:
    system.says(stolen=10, idle=100, ours=50, child=20)
    watch = LoadWatch()
    # 100 ticks more of one processor and 60 of the other, of which 30 idle on one and 60 on the other.
    system.says(stolen=30, idle=130, ours=80, child=40)
    assert watch.load().others == pytest.approx(20 / 160)


def test_a_share_stays_between_nothing_and_all(system: System) -> None:
    system.says(stolen=0, idle=0, ours=50, child=0)
    watch = LoadWatch()
    system.says(stolen=0, idle=50, ours=40, child=20)  # ours looks like less than before
    assert watch.load().others is not None
    assert 0 <= watch.load().others <= 1


def test_where_the_system_keeps_no_counts_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(load, "_PROC", tmp_path)
    monkeypatch.setattr(os, "getloadavg", refused)
    found = LoadWatch().load()
    assert found == Load(None, None)
    assert str(found) == "load not known"
    assert summary([found]) == summary([]) == "not recorded"


def test_a_program_of_somebody_else_is_seen_and_one_of_ours_is_not() -> None:
    spin = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
    watch = LoadWatch()
    subprocess.run([sys.executable, "-c", spin.format(0.5)], check=True)
    ours = watch.load()
    # One that outlives the process that started it is nobody's here.
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin.format(2.0)!r}])"
    watch = LoadWatch()
    subprocess.run([sys.executable, "-c", start], check=True)
    time.sleep(2.0)
    theirs = watch.load()
    assert ours.others is not None
    assert theirs.others is not None
    assert 0 <= ours.others <= 1
    assert 0 < theirs.others <= 1
    assert theirs.average is not None
