"""The memory report as one HTML page: drawings as SVG, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torchkiln.memory.amounts import bytes_text, line_text, seconds_text, share_text, shortened
from torchkiln.memory.report import BudgetPoint, LineUse, MemoryReport, TensorUse
from torchkiln.memory.table import (
    AMOUNTS,
    BUDGET_HEADINGS,
    SAVED,
    BudgetRow,
    budget_cells,
    budget_rows,
    extent_text,
    line_cells,
    outside_text,
)
from torchkiln.web_page import key, table, web_page

_MOST_BARS = 15
_REMARK = (
    "Bytes are those of activations: inputs, parameters, results and gradients are not in. Times are estimates for one"
    " thread."
)


def page(report: MemoryReport) -> str:
    """The page as text; the user's code in it is escaped."""
    chosen = report.chosen
    parts = (
        f"<p>{escape(_summary(report))} {extent_text(report)}.</p>",
        "<h2>Budgets: peak memory against extra compute</h2>",
        _curve(report),
        table(BUDGET_HEADINGS, (tuple(map(escape, row)) for row in budget_cells(report)), ("budget",)),
        f'<p class="remark">{_REMARK} {outside_text(report)}</p>',
        f"<h2>By source line at budget {escape(str(chosen.budget))}</h2>",
        key({amount.label: amount.color for amount in AMOUNTS}),
        _line_bars(chosen.lines),
        _line_table(chosen),
        *(_details(row) for row in budget_rows(report) if row.point.budget != chosen.budget),
    )
    return web_page(report.title, parts)


def _summary(report: MemoryReport) -> str:
    default, chosen = report.default, report.chosen
    text = (
        f"Eager keeps {bytes_text(report.eager_bytes)} for backward, torchkiln {bytes_text(default.saved_bytes)} by"
        f" default ({share_text(default.saved_bytes, report.eager_bytes)} of eager) with a simulated peak of"
        f" {bytes_text(default.peak_bytes)}."
    )
    if chosen.budget == default.budget:
        return text
    return (
        f"{text} The budget in force, {chosen.budget}, keeps {bytes_text(chosen.saved_bytes)} with a peak of"
        f" {bytes_text(chosen.peak_bytes)} and recomputes for {seconds_text(chosen.extra_seconds)} per step."
    )


def _curve(report: MemoryReport) -> str:
    """Peak memory to the right, extra compute upwards, one point for each budget."""
    left, right, top, bottom = 90.0, 860.0, 20.0, 260.0
    rows = sorted(budget_rows(report), key=lambda row: -row.point.peak_bytes)
    most = max(row.point.peak_bytes for row in rows) or 1
    longest = max(row.point.extra_seconds for row in rows) or 1.0

    def place(part_across: float, part_up: float) -> tuple[float, float]:
        return left + (right - left) * part_across / 1.05, bottom - (bottom - top) * part_up / 1.1

    parts = [
        '<svg class="drawing" viewBox="0 0 900 300" role="img" aria-label="Peak memory and extra compute by budget">',
        f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<line class="axis" x1="{left}" y1="{bottom}" x2="{left}" y2="{top}"/>',
        f'<text x="{right}" y="{bottom + 36}" text-anchor="end">simulated peak of activations</text>',
        f'<text x="{left + 8}" y="{top - 6}">recomputed per step</text>',
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        across, up = place(part, part)
        parts.append(f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">{bytes_text(part * most)}</text>')
        parts.append(f'<text x="{left - 8}" y="{up + 4:.1f}" text-anchor="end">{seconds_text(part * longest)}</text>')
    corners = []
    for row in rows:
        point = row.point
        across, up = place(point.peak_bytes / most, point.extra_seconds / longest)
        corners.append(f"{across:.1f},{up:.1f}")
        tip = (
            f"budget {row.name}: saved {bytes_text(point.saved_bytes)}, peak {bytes_text(point.peak_bytes)},"
            f" {seconds_text(point.extra_seconds)} recomputed"
        )
        parts.append(
            f'<g><title>{escape(tip)}</title><circle fill="{SAVED.color}" cx="{across:.1f}" cy="{up:.1f}" r="5"/>'
            f'<text x="{across + 8:.1f}" y="{up - 6:.1f}">{escape(row.label)}</text></g>'
        )
    return "\n".join([*parts, f'<polyline class="curve" points="{" ".join(corners)}"/>', "</svg>"])


def _line_bars(lines: Sequence[LineUse]) -> str:
    """A bar for each amount of each line."""
    shown = [use for use in lines[:_MOST_BARS] if any(amount.of(use) for amount in AMOUNTS)]
    if not shown:
        return ""
    largest = max(amount.of(use) for use in shown for amount in AMOUNTS)
    left, width, height = 330.0, 480.0, 34
    total = height * len(shown) + 6
    label = "Saved and recomputed bytes by source line"
    parts = [f'<svg class="drawing" viewBox="0 0 900 {total}" role="img" aria-label="{label}">']
    for place, use in enumerate(shown):
        top = place * height + 4
        name = line_text(use.line)
        parts.append(
            f'<g><title>{escape(name)}</title><text x="{left - 8}" y="{top + 18}" text-anchor="end">'
            f"{escape(shortened(name, 46))}</text></g>"
        )
        for row, amount in enumerate(AMOUNTS):
            size = amount.of(use)
            parts.append(
                f'<g><title>{amount.label}: {bytes_text(size)}</title><rect fill="{amount.color}" x="{left}"'
                f' y="{top + 9 * row}" width="{width * size / largest:.1f}" height="8"/></g>'
            )
        parts.append(f'<text x="{left + width + 12}" y="{top + 18}">{bytes_text(use.saved_bytes)}</text>')
    return "\n".join([*parts, "</svg>"])


def _line_table(point: BudgetPoint) -> str:
    rows = []
    for use in point.lines:
        tensors = _tensors("saved", use.saved) + _tensors("recomputed", use.recomputed)
        listed = f"<details><summary>{len(use.saved) + len(use.recomputed)} tensors</summary>{tensors}</details>"
        rows.append((f"<code>{escape(line_text(use.line))}</code>{listed if tensors else ''}", *line_cells(use)))
    return table(("line", *(amount.label for amount in AMOUNTS)), rows, ("line",))


def _tensors(what: str, tensors: Sequence[TensorUse]) -> str:
    if not tensors:
        return ""
    items = "".join(
        f"<li><code>{escape(tensor.name)}</code>: {escape(tensor.operator)}"
        f"{f' in {escape(tensor.module)}' if tensor.module else ''}, {tensor.dtype}"
        f" [{', '.join(map(str, tensor.shape))}], {bytes_text(tensor.bytes)}</li>"
        for tensor in tensors
    )
    return f"<p>{what}</p><ul>{items}</ul>"


def _details(row: BudgetRow) -> str:
    point = row.point
    summary = f"{bytes_text(point.saved_bytes)} saved, peak {bytes_text(point.peak_bytes)}"
    return (
        f"<h2>By source line at budget {escape(row.name)}</h2>\n<details><summary>{summary}</summary>\n"
        f"{_line_bars(point.lines)}\n{_line_table(point)}\n</details>"
    )
