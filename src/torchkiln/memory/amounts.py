"""Bytes, times and source lines as a person reads them."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    name: str
    bytes: int


_UNITS = tuple(Unit(name, 1024**power) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))


def largest_unit(count: float) -> Unit:
    """The largest unit of which ``count`` bytes are one at least."""
    return next((unit for unit in reversed(_UNITS) if count >= unit.bytes), _UNITS[0])


def bytes_text(count: float) -> str:
    """``"12.3 MiB"``: three digits at least, no fraction of a byte."""
    unit = largest_unit(count)
    amount = count / unit.bytes
    digits = 0 if unit.bytes == 1 or amount >= 100 else 1 if amount >= 10 else 2
    return f"{amount:.{digits}f} {unit.name}"


def seconds_text(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def share_text(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def line_text(line: str) -> str:
    """A source line with the name of its file in place of the whole path."""
    path, colon, rest = line.partition(":")
    return f"{os.path.basename(path)}{colon}{rest}" if line else "(line not known)"


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
