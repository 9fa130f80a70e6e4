"""The memory report as one HTML page: drawings as SVG, tables, no script and nothing to load."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torchkiln.memory.amounts import bytes_text, line_text, seconds_text, share_text
from torchkiln.memory.report import BudgetPoint, LineUse, MemoryReport, TensorUse
from torchkiln.memory.table import BudgetRow, budget_rows

_STYLE = """
:root { color-scheme: light dark; --saved: #2a6fbb; --again: #e08a1e; --eager: #8a8f98; --line: #8884; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
code { font-family: ui-monospace, monospace; font-size: .87em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: currentColor; } .axis { stroke: currentColor; opacity: .35; }
.saved { fill: var(--saved); } .again { fill: var(--again); } .eager { fill: var(--eager); }
.curve { fill: none; stroke: var(--saved); opacity: .5; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
summary { cursor: pointer; } .remark { opacity: .75; }
"""
_KEYS = (
    ("var(--eager)", "saved by eager"),
    ("var(--saved)", "saved"),
    ("var(--again)", "computed again in backward"),
)


def page(report: MemoryReport) -> str:
    """The page as text; the user's code in it is escaped."""
    title = f"Memory for the backward of {report.model}"
    graphs = "1 graph" if report.graphs == 1 else f"{report.graphs} graphs"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{_summary(report)} {graphs}, {report.nodes:,} nodes.</p>",
        "<h2>Budgets: peak memory against extra compute</h2>",
        _curve(report),
        _budget_table(report),
        _remark(report),
        f"<h2>By source line at budget {escape(str(report.chosen.budget))}</h2>",
        _key(),
        _line_bars(report.chosen.lines),
        _line_table(report.chosen),
        *(_details(row) for row in budget_rows(report) if row.point.budget != report.chosen.budget),
        "</body>",
        "</html>",
    ]
    return "\n".join(part for part in parts if part)


def _summary(report: MemoryReport) -> str:
    default = report.default
    text = (
        f"Eager keeps {bytes_text(report.eager_bytes)} for backward, torchkiln {bytes_text(default.saved_bytes)} by"
        f" default ({share_text(default.saved_bytes, report.eager_bytes)} of eager) with a simulated peak of"
        f" {bytes_text(default.peak_bytes)}."
    )
    chosen = report.chosen
    if chosen.budget != default.budget:
        text += (
            f" The budget in force, {chosen.budget}, keeps {bytes_text(chosen.saved_bytes)} with a peak of"
            f" {bytes_text(chosen.peak_bytes)} and computes {seconds_text(chosen.extra_seconds)} again per step."
        )
    return escape(text)


def _remark(report: MemoryReport) -> str:
    outside = ""
    if report.outside_bytes:
        outside = f" {bytes_text(report.outside_bytes)} of each row lie outside of the graphs: no budget changes them."
    return (
        '<p class="remark">Bytes are those of activations: inputs, parameters, results and gradients are not in. Times'
        f" are estimates for one thread.{outside}</p>"
    )


def _curve(report: MemoryReport) -> str:
    """Peak memory to the right, extra compute upwards, one point for each budget."""
    left, right, top, bottom = 90.0, 860.0, 20.0, 260.0
    rows = sorted(budget_rows(report), key=lambda row: -row.point.peak_bytes)
    most = max(row.point.peak_bytes for row in rows) or 1
    longest = max(row.point.extra_seconds for row in rows) or 1.0

    def place(point: BudgetPoint) -> tuple[float, float]:
        across = left + (right - left) * point.peak_bytes / (1.05 * most)
        return across, bottom - (bottom - top) * point.extra_seconds / (1.1 * longest)

    parts = [
        '<svg viewBox="0 0 900 300" role="img" aria-label="Peak memory against extra compute by budget">',
        f'<line class="axis" x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
        f'<line class="axis" x1="{left}" y1="{bottom}" x2="{left}" y2="{top}"/>',
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        across = left + (right - left) * part / 1.05
        up = bottom - (bottom - top) * part / 1.1
        parts.append(f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">{bytes_text(part * most)}</text>')
        parts.append(f'<text x="{left - 8}" y="{up + 4:.1f}" text-anchor="end">{seconds_text(part * longest)}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 36}" text-anchor="end">simulated peak of activations</text>')
    parts.append(f'<text x="{left + 8}" y="{top - 6}">computed again per step</text>')
    corners = " ".join(f"{across:.1f},{up:.1f}" for across, up in (place(row.point) for row in rows))
    parts.append(f'<polyline class="curve" points="{corners}"/>')
    for row in rows:
        point = row.point
        across, up = place(point)
        tip = (
            f"budget {row.name}: saved {bytes_text(point.saved_bytes)}, peak {bytes_text(point.peak_bytes)},"
            f" {seconds_text(point.extra_seconds)} computed again"
        )
        parts.append(
            f'<g><title>{escape(tip)}</title><circle class="saved" cx="{across:.1f}" cy="{up:.1f}" r="5"/>'
            f'<text x="{across + 8:.1f}" y="{up - 6:.1f}">{escape(row.label)}</text></g>'
        )
    return "\n".join([*parts, "</svg>"])


def _budget_table(report: MemoryReport) -> str:
    rows = [("eager", bytes_text(report.eager_bytes), "100 %", "", "", "")]
    for row in budget_rows(report):
        point = row.point
        rows.append(
            (
                row.name,
                bytes_text(point.saved_bytes),
                share_text(point.saved_bytes, report.eager_bytes),
                bytes_text(point.peak_bytes),
                seconds_text(point.extra_seconds),
                share_text(point.extra_seconds, report.forward_seconds),
            )
        )
    return _table(("budget", "saved", "of eager", "simulated peak", "extra compute", "of forward"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


def _key() -> str:
    colors = (f'<span class="key" style="background: {color}"></span>{text}' for color, text in _KEYS)
    return f"<p>{''.join(colors)}</p>"


def _line_bars(lines: Sequence[LineUse], most_lines: int = 15) -> str:
    """Three bars for each line: what eager keeps, what is saved, what is computed again."""
    shown = [use for use in lines[:most_lines] if use.eager_bytes or use.saved_bytes or use.recomputed_bytes]
    if not shown:
        return ""
    largest = max(max(use.eager_bytes, use.saved_bytes, use.recomputed_bytes) for use in shown)
    left, width, height = 330.0, 480.0, 34
    total = height * len(shown) + 6
    parts = [f'<svg viewBox="0 0 900 {total}" role="img" aria-label="Saved and recomputed bytes by source line">']
    for place, use in enumerate(shown):
        top = place * height + 4
        name = line_text(use.line)
        short = name if len(name) <= 46 else f"{name[:45]}…"
        parts.append(
            f'<g><title>{escape(name)}</title><text x="{left - 8}" y="{top + 18}" text-anchor="end">{escape(short)}'
            "</text></g>"
        )
        bars = (
            ("eager", "saved by eager", use.eager_bytes),
            ("saved", "saved", use.saved_bytes),
            ("again", "computed again", use.recomputed_bytes),
        )
        for row, (style, text, size) in enumerate(bars):
            length = width * size / largest
            parts.append(
                f'<g><title>{text}: {bytes_text(size)}</title><rect class="{style}" x="{left}" y="{top + 9 * row}"'
                f' width="{length:.1f}" height="8"/></g>'
            )
        parts.append(f'<text x="{left + width + 12}" y="{top + 18}">{bytes_text(use.saved_bytes)}</text>')
    return "\n".join([*parts, "</svg>"])


def _line_table(point: BudgetPoint) -> str:
    rows = []
    for use in point.lines:
        cells = (use.eager_bytes, use.saved_bytes, use.recomputed_bytes)
        amounts = "".join(f"<td>{bytes_text(size) if size else ''}</td>" for size in cells)
        tensors = _tensors("saved", use.saved) + _tensors("computed again", use.recomputed)
        listed = f"<details><summary>{len(use.saved) + len(use.recomputed)} tensors</summary>{tensors}</details>"
        line = f"<code>{escape(line_text(use.line))}</code>{listed if tensors else ''}"
        rows.append(f"<tr><td>{line}</td>{amounts}</tr>")
    head = "<th>line</th><th>saved by eager</th><th>saved</th><th>computed again</th>"
    body = "\n".join(rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"


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
