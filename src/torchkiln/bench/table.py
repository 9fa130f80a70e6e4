"""Figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from torchkiln.bench.load import summary
from torchkiln.bench.records import BASE, Figures, Record, percent, uncertainty
from torchkiln.bench.summary import SUMMARY_TITLES, SUMMARY_WORDS, summaries
from torchkiln.bench.targets import outcomes
from torchkiln.stats import counted


def cells_table(records: Iterable[Record]) -> Table:
    """A line for each cell and backend; what is relative is relative to eager, above 1 is better for speed."""
    shown = list(records)
    table = Table(
        title=f"Time of a step and of the first call\n{summary(record.load for record in shown)}",
        caption="peak MiB: the process and all that it starts, first call included; of steps: the process alone",
    )
    table.add_column("entry")
    table.add_column("cell")
    table.add_column("backend")
    for title in ("ms/step", "±", "× eager", "first call s", "peak MiB", "of steps", "/ eager", "notes"):
        table.add_column(title, justify="right" if title != "notes" else "left")
    for record in shown:
        base = record.figures.get(BASE)
        for k, (backend, figures) in enumerate(record.figures.items()):
            names = (record.cell.entry, record.cell.kind) if k == 0 else ("", "")
            table.add_row(*names, backend, *_row(figures, base, record.speedup(backend, BASE)))
        table.add_section()
    return table


def _row(figures: Figures, base: Figures | None, speedup: float | None) -> list[str | Text]:
    if figures.failure:
        return ["", "", "", "", "", "", "", Text(figures.failure, style="red")]
    relative = base is not None and not base.failure and base.step_mib
    return [
        f"{figures.ms:.3f}",
        percent(figures.spread),
        Text("" if speedup is None else f"{speedup:.2f}", style="red" if speedup and speedup < 0.97 else ""),
        f"{figures.first_seconds:.2f}",
        f"{figures.peak_mib:.0f}",
        f"{figures.step_mib:.0f}",
        f"{figures.step_mib / base.step_mib:.2f}" if relative and base else "",
        notes(figures),
    ]


def notes(figures: Figures) -> str:
    """What a reader should know beside the numbers."""
    said = []
    if not figures.failure and not figures.is_reliable:
        said.append(f"left out: rounds differ too much, standard error {percent(uncertainty(figures.rounds))}")
    if figures.fallbacks:
        said.append(f"{counted(len(figures.fallbacks), 'graph')} could not be compiled and ran eagerly")
    if figures.slower:
        said.append(f"{counted(len(figures.slower), 'graph')} ran eagerly, which was measured to be faster")
    if figures.difference is not None and figures.difference > 0.02:
        said.append(f"differs from eager by {figures.difference:.1%}")
    return "; ".join(said)


def summary_table(records: Sequence[Record]) -> Table:
    """Each backend against each of the others, over the cells that both got through with reliable times."""
    table = Table(title="Geometric means over cells")
    for title in SUMMARY_TITLES:
        table.add_column(title, justify="left" if title in SUMMARY_WORDS else "right")
    for line in summaries(records):
        table.add_row(*line.row)
    return table


def targets_table(records: Sequence[Record]) -> Table:
    """What is to be reached, and whether it is."""
    table = Table(title="Targets")
    for title in ("target", "result", "figure", "missed by"):
        table.add_column(title)
    for outcome in outcomes(records):
        color = {True: "green", False: "red", None: ""}[outcome.met]
        table.add_row(outcome.target, Text(outcome.word, style=color), outcome.figure, str(len(outcome.misses) or ""))
    return table
