"""How busy a machine is with other things while it is measured: its load average, and what others take of the time."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchkiln.bench.resident import descendants

_PROC = Path("/proc")


@dataclass(frozen=True)
class Load:
    """``average`` is the system's load average over the last minute, which counts what is measured too.

    ``others`` is the share of processor time that neither this process nor any it started took, of the processors it
    may run on; what a hypervisor took for other machines is in it. None where it is not known.
    """

    average: float | None = None
    others: float | None = None

    def __str__(self) -> str:
        known = [
            "" if self.others is None else f"others took {self.others:.0%}",
            "" if self.average is None else f"load average {self.average:.1f}",
        ]
        return ", ".join(filter(None, known)) or "load not known"


class LoadWatch:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._before = _processor_ticks()

    def load(self) -> Load:
        """What it was like since then."""
        return Load(_load_average(), _taken_by_others(self._before, _processor_ticks()))


@dataclass(frozen=True)
class Ticks:
    """Processor time up to some moment: all there was, what of it was not idle, and what was ours."""

    all: int
    busy: int
    ours: int


def _taken_by_others(before: Ticks | None, after: Ticks | None) -> float | None:
    if before is None or after is None or after.all <= before.all:
        return None
    taken = (after.busy - before.busy) - (after.ours - before.ours)
    # Processes are accounted for at other moments than processors, so a little may be missing or too much.
    return min(max(taken / (after.all - before.all), 0.0), 1.0)


def _processor_ticks() -> Ticks | None:
    try:
        processors = os.sched_getaffinity(0)
        text = (_PROC / "stat").read_text()
    except (OSError, AttributeError):  # not Linux
        return None
    everything = busy = 0
    for number, fields in re.findall(r"^cpu(\d+) (.*)$", text, re.M):
        if int(number) in processors:
            # user, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen; guests are in user already
            ticks = [int(field) for field in fields.split()[:8]]
            everything += sum(ticks)
            busy += sum(ticks) - sum(ticks[3:5])
    ours = sum(map(_process_ticks, (os.getpid(), *descendants(os.getpid()))))
    return Ticks(everything, busy, ours) if everything else None


def _process_ticks(process: int) -> int:
    """What a process took, with what those took that it started and saw end; 0 for one that has ended itself."""
    try:
        text = (_PROC / str(process) / "stat").read_text()
    except OSError:
        return 0
    # The name before it may have anything in it. Fields 14 to 17 of the line are times, field 3 is the first of these.
    return sum(map(int, text.rpartition(")")[2].split()[11:15]))


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def summary(loads: Iterable[Load]) -> str:
    """What many cells were measured under, in one line."""
    given = list(loads)
    others = [load.others for load in given if load.others is not None]
    averages = [load.average for load in given if load.average is not None]
    if not others and not averages:
        return "not recorded"
    parts = []
    if others:
        parts.append(
            f"others took {statistics.median(others):.0%} of processor time in the median cell,"
            f" {max(others):.0%} at most"
        )
    if averages:
        parts.append(f"load average {min(averages):.1f} to {max(averages):.1f}")
    return "; ".join(parts)
