"""``python -m tests.gpu.visit``: all that a visit to a machine with a card is for, what matters most first.

Each stage is a process, which is ended when its time is up, and goes on where it stopped in a further visit. The logs,
figures and lists are in ``results/gpu``, and in an archive of a few files at most: ``$OUT/gpu.tar.gz``, or beside them.
A visit that finds an archive there goes on from it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "gpu"
_MOST_LOG = 1 << 20  # bytes kept of each log


@dataclass(frozen=True)
class Stage:
    """``share`` is that of the minutes which the stages from this one on have; ``minutes`` the most it needs."""

    name: str
    arguments: tuple[str, ...]
    share: float
    minutes: float = 60.0
    timed: bool = True  # whether it takes ``--minutes``


STAGES = (
    Stage("first", ("-m", "tests.gpu.first_kernels"), 1.0, 1.5, timed=False),
    Stage("tests", ("-m", "tests.gpu"), 0.45),
    Stage("kernels", ("-m", "benchmarks.gpu", "kernels"), 0.35),
    Stage("models", ("-m", "benchmarks.gpu", "models"), 0.75),
    Stage("launches", ("-m", "benchmarks.gpu", "launches"), 1.0),
)


def run(stages: tuple[Stage, ...], seconds: float) -> None:
    """All stages within so many seconds."""
    end = time.monotonic() + seconds
    for stage in stages:
        left = end - time.monotonic()
        if left < 5:
            print(f"=== {stage.name}: no time is left", flush=True)
            continue
        given = min(left * stage.share, 60 * stage.minutes)
        print(f"=== {stage.name}, {given:.0f} s", flush=True)
        # A stage that keeps to its time has a little longer to say what it found.
        minutes = ("--minutes", f"{max(given - 10, 1) / 60:.3f}") if stage.timed else ()
        print(f"=== {stage.name}: {_ended([sys.executable, *stage.arguments, *minutes], given)}", flush=True)


def _ended(command: list[str], seconds: float) -> str:
    """How a process ended, with those that it has started, in a group of their own."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        said = f"ended with {process.wait(timeout=seconds)}"
    except subprocess.TimeoutExpired:
        said = "stopped"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return f"{said} after {time.monotonic() - start:.0f} s"


def pack(folder: Path, archive: Path) -> None:
    """The end of each file of a folder, in one archive."""
    for file in folder.iterdir():
        if file.suffix == ".log" and file.stat().st_size > _MOST_LOG:
            file.write_bytes(file.read_bytes()[-_MOST_LOG:])
    with tarfile.open(archive, "w:gz") as out:
        for file in sorted(folder.iterdir()):
            if file != archive:
                out.add(file, file.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.visit", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--stages", default=",".join(stage.name for stage in STAGES), help="names, with commas")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    archive = Path(os.environ.get("OUT") or FOLDER) / "gpu.tar.gz"
    earlier = FOLDER / "gpu.tar.gz"
    if earlier.exists() and not (FOLDER / "passed.txt").exists():
        with tarfile.open(earlier) as found:
            found.extractall(FOLDER, filter="data")
    try:
        run(tuple(stage for stage in STAGES if stage.name in options.stages.split(",")), 60 * options.minutes)
    finally:
        pack(FOLDER, archive)
        print(f"kept in {archive}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
