"""``python -m tests.gpu``: the tests that need a card, in several processes, within the minutes of one visit.

What passed is kept in ``results/gpu/passed.txt``, and a further run leaves it out; ``--again`` begins anew. The logs
are beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "gpu"
_BEFORE = FOLDER / "passed-before.txt"


def main() -> int:
    options = _options()
    FOLDER.mkdir(parents=True, exist_ok=True)
    passed = FOLDER / "passed.txt"
    if options.again:
        passed.unlink(missing_ok=True)
    before = _lines(passed)
    # Processes that start later must divide the same tests.
    _BEFORE.write_text("".join(f"{line}\n" for line in before), encoding="utf-8")
    end = time.monotonic() + 60 * options.minutes
    running = [_start(part, options.workers, passed, options.rest) for part in range(options.workers)]
    while any(process.poll() is None for process in running) and time.monotonic() < end:
        time.sleep(5)
        print(f"{len(_lines(passed)) - len(before)} passed, {max(0, end - time.monotonic()):.0f} s left", flush=True)
    for process in running:
        if process.poll() is None:
            process.terminate()
    codes = [process.wait() for process in running]
    for part in range(options.workers):
        print(f"--- part {part}\n{_summary(_log(part))}")
    # pytest answers 5 where nothing is left to run.
    finished = all(code in (0, 5) for code in codes)
    state = "finished" if finished else "failures, or time was up"
    print(f"{len(_lines(passed))} passed in all; {state}; logs: {FOLDER}")
    return 0 if finished else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    parser.add_argument("rest", nargs="*", help="for pytest, after --")
    return parser.parse_args()


def _start(part: int, parts: int, passed: Path, rest: list[str]) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment |= {"KILN_GPU_PASSED": str(passed), "KILN_GPU_BEFORE": str(_BEFORE), "KILN_GPU_PART": f"{part}/{parts}"}
    shown = "-q", "--tb=short", "--show-capture=no"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "card", *shown, *rest]
    with _log(part).open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _log(part: int) -> Path:
    return FOLDER / f"test-{part}.log"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _summary(log: Path) -> str:
    """What failed, and the last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([*(line for line in lines if line.startswith(("FAILED", "ERROR"))), *lines[-1:]])


if __name__ == "__main__":
    sys.exit(main())
