"""The drawings of a memory report as a picture, by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from torchkiln.errors import KilnError
from torchkiln.memory.amounts import largest_unit, line_text, seconds_text
from torchkiln.memory.report import MemoryReport
from torchkiln.memory.table import budget_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Blue and orange that people with any color vision tell apart.
SAVED, RECOMPUTED, EAGER = "#2a6fbb", "#e08a1e", "#8a8f98"
MOST_LINES = 15


def picture(report: MemoryReport) -> bytes:
    """A PNG with what each line saves, the budgets, and the comparison with eager."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KilnError(
            "The picture of a memory report needs matplotlib; install it with: pip install 'torchkiln[report]'."
        ) from error
    lines = min(MOST_LINES, len(report.chosen.lines))
    heights = (4.5, 1.2 + 0.36 * lines)
    figure = Figure(figsize=(13, 0.5 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Memory for the backward of {report.model}")
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
    axes.step(peaks, extra, where="post", color=SAVED, alpha=0.4)
    axes.plot(peaks, extra, "o", color=SAVED)
    for row, place in zip(rows, zip(peaks, extra, strict=True), strict=True):
        axes.annotate(row.label, place, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_title("Budgets: peak memory against extra compute")
    axes.set_xlabel(f"simulated peak of activations, {unit.name}")
    axes.set_ylabel("computed again per step")
    axes.set_xlim(0, max(peaks) * 1.12 or 1)
    axes.set_ylim(0, max(extra) * 1.12 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: seconds_text(value))
    axes.grid(alpha=0.25)


def _draw_comparison(axes: Axes, report: MemoryReport) -> None:
    rows = [("eager", report.eager_bytes), *((row.name, row.point.saved_bytes) for row in budget_rows(report))]
    unit = largest_unit(max(size for _, size in rows))
    colors = [EAGER, *[SAVED] * (len(rows) - 1)]
    bars = axes.bar([label for label, _ in rows], [size / unit.bytes for _, size in rows], color=colors)
    axes.bar_label(bars, [f"{size / unit.bytes:.3g}" for _, size in rows], fontsize=7, padding=2)
    axes.set_title("Saved for backward: eager and budgets")
    axes.set_ylabel(unit.name)
    axes.tick_params(axis="x", labelrotation=45, labelsize=8)
    axes.margins(y=0.12)


def _draw_lines(axes: Axes, report: MemoryReport) -> None:
    uses = report.chosen.lines[:MOST_LINES]
    places = range(len(uses))
    unit = largest_unit(max((max(use.eager_bytes, use.saved_bytes, use.recomputed_bytes) for use in uses), default=0))
    kinds = (
        (-0.28, [use.eager_bytes for use in uses], EAGER, "saved by eager"),
        (0.0, [use.saved_bytes for use in uses], SAVED, "saved"),
        (0.28, [use.recomputed_bytes for use in uses], RECOMPUTED, "computed again"),
    )
    for shift, sizes, color, label in kinds:
        lengths = [size / unit.bytes for size in sizes]
        axes.barh([place + shift for place in places], lengths, height=0.26, color=color, label=label)
    # A dollar sign would start a formula.
    names = [_shortened(line_text(use.line)).replace("$", r"\$") for use in uses]
    axes.set_yticks(list(places), names, fontsize=8, family="monospace")
    axes.invert_yaxis()
    axes.set_title(f"By source line at budget {report.chosen.budget}")
    axes.set_xlabel(unit.name)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(loc="lower right")


def _shortened(text: str, length: int = 70) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
