"""Bytes, times and source lines as a person reads them."""

from __future__ import annotations

import os

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """``"12.3 MiB"``: three digits at least, whole numbers of bytes."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {_UNITS[unit]}"


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
