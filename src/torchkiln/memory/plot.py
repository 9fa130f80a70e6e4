"""The drawings of a memory report as a picture, by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from torchkiln.errors import KilnError
from torchkiln.memory.amounts import largest_unit, line_text, seconds_text, shortened
from torchkiln.memory.report import MemoryReport
from torchkiln.memory.table import AMOUNTS, SAVED, budget_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_LINES = 15


def picture(report: MemoryReport) -> bytes:
    """A PNG with what each line saves, the budgets, and the comparison with eager."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KilnError(
            "The picture of a memory report needs matplotlib; install it with: pip install 'torchkiln[report]'."
        ) from error
    lines = min(_MOST_LINES, len(report.chosen.lines))
    heights = (4.5, 1.2 + 0.36 * lines)
    figure = Figure(figsize=(13, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(report.title)
    # In parts of their own, so that the long names of the lines do not push the upper drawings aside.
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    upper, lower = parts
    left, right = upper.subplots(1, 2)
    _draw_budgets(left, report)
    _draw_comparison(right, report)
    _draw_lines(lower.subplots(), report)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw_budgets(axes: Axes, report: MemoryReport) -> None:
    rows = budget_rows(report)
    rows.sort(key=lambda row: -row.point.peak_bytes)
    unit = largest_unit(max(row.point.peak_bytes for row in rows))
    peaks = [row.point.peak_bytes / unit.bytes for row in rows]
    extra = [row.point.extra_seconds for row in rows]
    axes.step(peaks, extra, where="post", color=SAVED.color, alpha=0.4)
    axes.plot(peaks, extra, "o", color=SAVED.color)
    for row, place in zip(rows, zip(peaks, extra, strict=True), strict=True):
        axes.annotate(row.label, place, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_title("Budgets: peak memory against extra compute")
    axes.set_xlabel(f"simulated peak of activations, {unit.name}")
    axes.set_ylabel("recomputed per step")
    axes.set_xlim(0, max(peaks) * 1.12 or 1)
    axes.set_ylim(0, max(extra) * 1.12 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: seconds_text(value))
    axes.grid(alpha=0.25)


def _draw_comparison(axes: Axes, report: MemoryReport) -> None:
    rows = [("eager", report.eager_bytes), *((row.name, row.point.saved_bytes) for row in budget_rows(report))]
    unit = largest_unit(max(size for _, size in rows))
    colors = [AMOUNTS[0].color, *[SAVED.color] * (len(rows) - 1)]
    bars = axes.bar([label for label, _ in rows], [size / unit.bytes for _, size in rows], color=colors)
    axes.bar_label(bars, [f"{size / unit.bytes:.3g}" for _, size in rows], fontsize=7, padding=2)
    axes.set_title("Saved for backward: eager and budgets")
    axes.set_ylabel(unit.name)
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes.margins(y=0.12)


def _draw_lines(axes: Axes, report: MemoryReport) -> None:
    uses = report.chosen.lines[:_MOST_LINES]
    places = range(len(uses))
    unit = largest_unit(max((amount.of(use) for use in uses for amount in AMOUNTS), default=0))
    for shift, amount in zip((-0.28, 0.0, 0.28), AMOUNTS, strict=True):
        lengths = [amount.of(use) / unit.bytes for use in uses]
        centers = [place + shift for place in places]
        axes.barh(centers, lengths, height=0.26, color=amount.color, label=amount.label)
    # A dollar sign would start a formula.
    names = [shortened(line_text(use.line), 70).replace("$", r"\$") for use in uses]
    axes.set_yticks(list(places), names, fontsize=8, family="monospace")
    axes.invert_yaxis()
    axes.set_title(f"By source line at budget {report.chosen.budget}")
    axes.set_xlabel(unit.name)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(loc="lower right")
