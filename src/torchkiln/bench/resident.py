"""Resident memory of processes: the peak of this one, and what one holds together with all that it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def tree_mib(root: int) -> float:
    """MiB that ``root`` holds now, and in addition those that only its descendants do; 0 where it has none.

    Of a descendant, pages count that no other process holds: what it shares with ``root`` is there already. What
    descendants share among each other is left out, so this is rather too little than too much. (Proportional shares
    would depend on how many processes outside map the same files, and make the system walk all pages of ``root``,
    which takes 5 to 20 ms for 400 MiB each time.)
    """
    started = list(descendants(root))
    return (_resident_kb(root) + sum(map(_private_kb, started))) / 1024 if started else 0.0


def peak_mib() -> float:
    """The most that this process has held since its start, or since :func:`forget_peak`."""
    return _kb(os.getpid(), "status", r"^VmHWM:\s+(\d+) kB$") / 1024


def forget_peak() -> None:
    """Make the system forget the peak of this process so far."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident_kb(process: int) -> int:
    return _kb(process, "status", r"^VmRSS:\s+(\d+) kB$")


def _private_kb(process: int) -> int:
    return _kb(process, "smaps_rollup", r"^Private_(?:Clean|Dirty):\s+(\d+) kB$")


def _kb(process: int, file: str, lines: str) -> int:
    """The sum of these lines; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{process}/{file}").read_text()
    except OSError:
        return 0
    return sum(map(int, re.findall(lines, text, re.M)))


def descendants(root: int) -> Iterator[int]:
    """Processes that ``root`` started, those that they started, and so on, of those that are alive."""
    for thread in _names(f"/proc/{root}/task"):
        try:
            found = [int(text) for text in Path(f"/proc/{root}/task/{thread}/children").read_text().split()]
        except OSError:  # it has ended
            continue
        for child in found:
            yield child
            yield from descendants(child)


def _names(folder: str) -> list[str]:
    """What is in a folder; nothing where it is gone, be it while it is read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
