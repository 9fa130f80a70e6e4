"""The memory report as tables of text, and the figures that all its forms show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from torchkiln.memory.amounts import bytes_text, line_text, seconds_text, share_text
from torchkiln.memory.report import BudgetPoint, LineUse, MemoryReport


@dataclass(frozen=True)
class Amount:
    """Bytes of a source line, and the color of their bars."""

    label: str
    color: str
    of: Callable[[LineUse], int]


# Blue and orange that people with any color vision tell apart.
SAVED = Amount("saved", "#2a6fbb", lambda use: use.saved_bytes)
AMOUNTS = (
    Amount("eager saves", "#8a8f98", lambda use: use.eager_bytes),
    SAVED,
    Amount("recomputed", "#e08a1e", lambda use: use.recomputed_bytes),
)


@dataclass(frozen=True)
class BudgetRow:
    """A budget, or neighbours that give the same, such as ``0.1 to 0``."""

    label: str
    point: BudgetPoint
    remark: str
    """What it is to the user: the default, in force, or nothing of note."""

    @property
    def name(self) -> str:
        return f"{self.label} ({self.remark})" if self.remark else self.label


def budget_rows(report: MemoryReport) -> list[BudgetRow]:
    """The points of the report, equal ones put together, and the one in force after them if it is none of them."""
    rows = []
    in_force = report.chosen.budget

    def figures(point: BudgetPoint) -> tuple[int, int, float]:
        return point.saved_bytes, point.peak_bytes, point.extra_seconds

    for _, group in groupby(report.points, key=figures):
        same = list(group)
        first, last = (f"{same[k].budget:g}" for k in (0, -1))
        here = any(point.budget == in_force for point in same)
        remark = "default" if same[0] is report.default else "in force" if here else ""
        rows.append(BudgetRow(first if first == last else f"{first} to {last}", same[0], remark))
    if all(point.budget != in_force for point in report.points):
        rows.append(BudgetRow(str(in_force), report.chosen, "in force"))
    return rows


BUDGET_HEADINGS = ("budget", "saved", "of eager", "peak", "extra compute", "of forward")


def budget_cells(report: MemoryReport) -> Iterator[tuple[str, ...]]:
    """The rows of the table of budgets, that of eager first."""
    yield "eager", bytes_text(report.eager_bytes), "100 %", "", "", ""
    for row in budget_rows(report):
        point = row.point
        yield (
            row.name,
            bytes_text(point.saved_bytes),
            share_text(point.saved_bytes, report.eager_bytes),
            bytes_text(point.peak_bytes),
            seconds_text(point.extra_seconds),
            share_text(point.extra_seconds, report.forward_seconds),
        )


def line_cells(use: LineUse) -> list[str]:
    return [bytes_text(count) if (count := amount.of(use)) else "" for amount in AMOUNTS]


def extent_text(report: MemoryReport) -> str:
    return f"{report.graphs} graph{'s' * (report.graphs != 1)}, {report.nodes:,} nodes"


def outside_text(report: MemoryReport) -> str:
    if not report.outside_bytes:
        return ""
    return f"{bytes_text(report.outside_bytes)} of each row lie outside of the graphs: no budget changes them."


def tables(report: MemoryReport) -> Iterator[Table]:
    budgets = Table(
        title=f"{report.title} ({extent_text(report)})",
        title_justify="left",
        caption=outside_text(report) or None,
        caption_justify="left",
    )
    for k, heading in enumerate(BUDGET_HEADINGS):
        budgets.add_column(heading, justify="right" if k else "left", no_wrap=bool(k))
    for row in budget_cells(report):
        budgets.add_row(*row)
    yield budgets
    lines = Table(title=f"By source line at budget {report.chosen.budget}", title_justify="left")
    lines.add_column("line", overflow="fold")
    lines.add_column("operators", overflow="fold")
    for amount in AMOUNTS:
        lines.add_column(amount.label, justify="right", no_wrap=True)
    for use in report.chosen.lines:
        operators = dict.fromkeys(tensor.operator for tensor in use.saved)
        # The text of the user's code is no markup.
        lines.add_row(Text(line_text(use.line)), Text(", ".join(operators)), *line_cells(use))
    yield lines
