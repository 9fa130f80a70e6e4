"""``python -m tests.gpu``: the tests that need a card, in several processes, within the minutes of one visit.

A process that hangs in a test, dies of one, or finds that the card takes nothing from it any more, is followed by one
that goes on with the next test. What passed is kept in ``results/gpu/passed.txt``, and a further run leaves it out;
``--again`` begins anew. The logs are beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "gpu"
# What pytest answers where all tests passed, some failed, or none was left; anything else ended it early.
_AT_AN_END = 0, 1, 5
# What is printed of failures: a terminal keeps little, and the logs have all.
_SHOWN, _WIDTH = 40, 200


@dataclass
class Part:
    """A share of the tests, and the process that runs it now."""

    number: int
    command: list[str]
    environment: dict[str, str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    codes: list[int] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / f"test-{self.number}.log"

    @property
    def begun(self) -> Path:
        """The tests that were begun in this run, one in each line."""
        return self.folder / f"begun-{self.number}.txt"

    def start(self) -> None:
        environment = {**os.environ, **self.environment}
        environment |= {"KILN_GPU_BEGUN": str(self.begun), "KILN_GPU_LOG": str(self.log)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.began = time.time()

    def quiet_for(self) -> float:
        """Seconds since it began, or began a test."""
        last = self.begun.stat().st_mtime if self.begun.exists() else 0.0
        return time.time() - max(last, self.began)

    def note(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\nENDED {text} in {(_lines(self.begun) or ['no test'])[-1]}\n")

    def stop(self) -> None:
        """A process that hangs in the driver may not hear of anything but this."""
        assert self.process is not None
        self.process.kill()
        try:
            self.codes.append(self.process.wait(timeout=10))
        except subprocess.TimeoutExpired:
            self.codes.append(-9)
        self.process = None


def watch(parts: list[Part], seconds: float, limit: float, say: float = 15.0) -> None:
    """Run every part to its end, for so many seconds, with at most ``limit`` of them for one test."""
    end, said = time.monotonic() + seconds, time.monotonic()
    for part in parts:
        part.start()
    while any(part.process is not None for part in parts):
        time.sleep(0.2)
        left = end - time.monotonic()
        for part in parts:
            if part.process is None:
                continue
            code = part.process.poll()
            if code is not None:
                part.codes.append(code)
                part.process = None
                if code not in _AT_AN_END:
                    part.note(f"with {code}")
                    # One that has begun no test since would end the same way again.
                    if left > 0 and part.begun.exists() and part.begun.stat().st_mtime >= part.began:
                        part.start()
            elif left <= 0:
                part.note("for want of time")
                part.stop()
            elif part.quiet_for() > limit:
                part.note(f"after {limit:.0f} s")
                part.stop()
                part.start()
        if time.monotonic() - said > say:
            said = time.monotonic()
            print(f"{sum(len(_lines(part.begun)) for part in parts)} begun, {max(0, left):.0f} s left", flush=True)


def main() -> int:
    options = _options()
    FOLDER.mkdir(parents=True, exist_ok=True)
    passed, before = FOLDER / "passed.txt", FOLDER / "passed-before.txt"
    if options.again:
        passed.unlink(missing_ok=True)
    # Processes that start later must divide the same tests.
    before.write_text("".join(f"{line}\n" for line in _lines(passed)), encoding="utf-8")
    parts = [_part(number, options, passed, before) for number in range(options.workers)]
    for part in parts:
        part.log.unlink(missing_ok=True)
        part.begun.unlink(missing_ok=True)
    watch(parts, 60 * options.minutes, options.limit)
    finished = all(part.codes and part.codes[-1] in (0, 5) and set(part.codes) <= {0, 5} for part in parts)
    report = [line for part in parts for line in _failures(part.log)]
    (FOLDER / "failures.txt").write_text("".join(f"{line}\n" for line in report), encoding="utf-8")
    print("\n".join(line[:_WIDTH] for line in report[:_SHOWN]))
    if len(report) > _SHOWN:
        print(f"... and {len(report) - _SHOWN} more in {FOLDER / 'failures.txt'}")
    for part in parts:
        last = (_lines(part.log) or ["nothing"])[-1][:_WIDTH]
        print(f"part {part.number}: {', '.join(map(str, part.codes))}: {last}")
    state = "finished" if finished else "failures, or time was up"
    now, then = len(_lines(passed)), len(_lines(before))
    print(f"{now - then} passed, {now} in all; {len(report)} did not; {state}; logs: {FOLDER}")
    return 0 if finished else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of a test")
    parser.add_argument("--again", action="store_true", help="run what has passed, too")
    parser.add_argument("rest", nargs="*", help="for pytest, after --")
    return parser.parse_args()


def _part(number: int, options: argparse.Namespace, passed: Path, before: Path) -> Part:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "KILN_GPU_PASSED": str(passed),
        "KILN_GPU_BEFORE": str(before),
        "KILN_GPU_PART": f"{number}/{options.workers}",
        "KILN_GPU_LIMIT": f"{max(1.0, options.limit - 10)}",
    }
    shown = "-q", "--tb=short", "--show-capture=no", "--no-summary", "-p", "no:cacheprovider"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "card", *shown, *options.rest]
    return Part(number, command, environment, FOLDER)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _failures(log: Path) -> list[str]:
    return [line for line in _lines(log) if line.startswith(("FAILED ", "ENDED "))]


if __name__ == "__main__":
    sys.exit(main())
