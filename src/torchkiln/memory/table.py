"""The memory report as tables of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from torchkiln.memory.amounts import bytes_text, line_text, seconds_text, share_text
from torchkiln.memory.report import BudgetPoint, MemoryReport


def tables(report: MemoryReport) -> Iterator[Table]:
    yield _budgets(report)
    yield _lines(report)


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


def _budgets(report: MemoryReport) -> Table:
    count = "1 graph" if report.graphs == 1 else f"{report.graphs} graphs"
    table = Table(
        title=f"Memory for the backward of {report.model} ({count}, {report.nodes:,} nodes)",
        title_justify="left",
        caption=_remark(report),
        caption_justify="left",
    )
    table.add_column("budget")
    for heading in ("saved", "of eager", "peak", "extra compute", "of forward"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("eager", bytes_text(report.eager_bytes), "100 %", "", "", "")
    for row in budget_rows(report):
        point = row.point
        table.add_row(
            row.name,
            bytes_text(point.saved_bytes),
            share_text(point.saved_bytes, report.eager_bytes),
            bytes_text(point.peak_bytes),
            seconds_text(point.extra_seconds),
            share_text(point.extra_seconds, report.forward_seconds),
        )
    return table


def _remark(report: MemoryReport) -> str | None:
    if not report.outside_bytes:
        return None
    return f"{bytes_text(report.outside_bytes)} of each row lie outside of the graphs: no budget changes them."


def _lines(report: MemoryReport) -> Table:
    table = Table(title=f"By source line at budget {report.chosen.budget}", title_justify="left")
    table.add_column("line", overflow="fold")
    table.add_column("operators", overflow="fold")
    for heading in ("eager saves", "saved", "computed again"):
        table.add_column(heading, justify="right", no_wrap=True)
    for use in report.chosen.lines:
        operators = dict.fromkeys(tensor.operator for tensor in use.saved)
        # The text of the user's code is no markup.
        table.add_row(
            Text(line_text(use.line)),
            Text(", ".join(operators)),
            *(bytes_text(count) if count else "" for count in (use.eager_bytes, use.saved_bytes, use.recomputed_bytes)),
        )
    return table
