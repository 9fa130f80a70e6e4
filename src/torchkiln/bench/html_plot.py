"""Speed-up over eager against the first call as one HTML page: a drawing as SVG, tables, no script, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from torchkiln.bench.load import summary
from torchkiln.bench.plot import Point, colors, limits, points, ticks
from torchkiln.bench.records import Record
from torchkiln.bench.summary import SUMMARY_TITLES, SUMMARY_WORDS, summaries
from torchkiln.web_page import key, table, web_page


def html_plot(records: Sequence[Record]) -> str:
    """The page as text; hovering over a point says what it is."""
    shown = points(records)
    summary_rows = ([*map(escape, line.row)] for line in summaries(records))
    parts = (
        f'<p class="remark">{escape(_where(records))}</p>',
        key(colors(shown)),
        _drawing(shown),
        "<h2>Geometric means over cells</h2>",
        table(SUMMARY_TITLES, summary_rows, SUMMARY_WORDS),
        f"<details><summary>{len(shown)} points</summary>",
        _points_table(shown),
        "</details>",
    )
    return web_page("Speed-up over eager against the first call", parts)


def _where(records: Sequence[Record]) -> str:
    machines = ", ".join(dict.fromkeys(record.machine for record in records))
    days = sorted({record.day for record in records})
    period = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "nothing was measured"
    load = summary(record.load for record in records)
    return f"{machines or 'no machine'}; {period}; load: {load}. Up and to the left is better; the line is eager."


def _drawing(shown: Sequence[Point]) -> str:
    """Seconds of the first call to the right, speed-up upwards, both logarithmic."""
    left, right, top, bottom = 60.0, 880.0, 20.0, 460.0
    across_limits = limits(point.first_seconds for point in shown)
    up_limits = limits(point.speedup for point in shown)
    color_of = colors(shown)

    def across(value: float) -> float:
        return left + (right - left) * _part(value, across_limits)

    def up(value: float) -> float:
        return bottom - (bottom - top) * _part(value, up_limits)

    parts = [f'<svg class="drawing" viewBox="0 0 900 510" role="img" aria-label="{len(shown)} points">']
    for tick in ticks(*across_limits):
        x = f"{across(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{tick:g} s</text>')
    for tick in ticks(*up_limits):
        y = f"{up(tick):.1f}"
        parts.append(f'<line class="{"axis" if tick == 1 else "grid"}" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="{left - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g} ×</text>')
    parts.append(f'<text x="{right}" y="{bottom + 38}" text-anchor="end">first call</text>')
    parts.append(f'<text x="{left}" y="{top - 6}">speed-up over eager</text>')
    for point in shown:
        center = f'cx="{across(point.first_seconds):.1f}" cy="{up(point.speedup):.1f}"'
        title = f"<title>{escape(str(point))}</title>"
        parts.append(f'<circle {center} r="5" fill="{color_of[point.backend]}">{title}</circle>')
    return "\n".join([*parts, "</svg>"])


def _part(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return math.log(value / low) / math.log(high / low)


def _points_table(shown: Sequence[Point]) -> str:
    rows = [
        (escape(str(p.cell)), escape(p.backend), f"{p.speedup:.2f}", f"{p.ms:.3f}", f"{p.first_seconds:.2f}")
        for p in sorted(shown, key=lambda p: p.speedup)
    ]
    words = ("cell", "backend")
    return table((*words, "× eager", "ms/step", "first call s"), rows, words)
