"""``make bench-operators``: measures what is not on record, shows the losses, writes the page.

    python -m benchmarks.operators --only programs --threads 1
    python -m benchmarks.operators --only softmax,flip --dtypes bfloat16 --layouts contiguous,every-second
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.operators import campaign
from benchmarks.operators.cells import DTYPES, Cell, cells, sample
from benchmarks.operators.entries import chosen
from benchmarks.operators.judge import losses, ratio, summary
from benchmarks.operators.layouts import Layout
from benchmarks.operators.measure import Effort
from benchmarks.operators.page import LOSS_TITLES, loss_row, page
from benchmarks.operators.records import PATH, Record
from torchkiln.bench.records import BASE, OURS, PEER, percent
from torchkiln.stats import counted

_LAYOUTS = ",".join(Layout)


def main(
    only: Annotated[str, typer.Option(help="Entries, parts of their names, or groups, with commas.")] = "",
    layouts: Annotated[str, typer.Option(help="Layouts, with commas.")] = _LAYOUTS,
    dtypes: Annotated[str, typer.Option(help="Dtypes, with commas.")] = ",".join(DTYPES),
    threads: Annotated[str, typer.Option(help="Numbers of threads, with commas; all: as many as cores.")] = "1,all",
    number: Annotated[int, typer.Option("--sample", help="Only so many cells, always the same ones.")] = 0,
    inductor: Annotated[bool, typer.Option("--inductor", help="Measure Inductor too, which takes far longer.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds for one cell.")] = 60.0,
    minutes: Annotated[float, typer.Option(help="Begin no cell after so long; a later run goes on.")] = math.inf,
    again: Annotated[bool, typer.Option("--again", help="Also what is on record already.")] = False,
    every: Annotated[bool, typer.Option("--all-cells", help="Show all cells, not the losses alone.")] = False,
    page_path: Annotated[Path | None, typer.Option("--page", help="Write the page from the cells asked for.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the records asked for as JSON.")] = None,
) -> None:
    """Operators compiled by kiln against eager; goes on where it stopped. Exit code 1 where a result is wrong."""
    try:
        entries = chosen(only)
    except LookupError as error:
        raise typer.BadParameter(str(error.args[0])) from None
    asked = cells(
        [(entry.name, entry.layouts) for entry in entries],
        [Layout(name) for name in _names("layout", layouts, list(Layout))],
        _names("dtype", dtypes, DTYPES),
        _threads(threads),
    )
    backends = (BASE, OURS, PEER) if inductor else (BASE, OURS)
    asked = sample(asked, number)
    done = _run(asked, backends, limit, 60 * minutes, again)
    _show(done, every)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(record) for record in done], indent=1) + "\n", encoding="utf-8")
    if page_path is not None:
        page_path.write_text(page(done, len(asked)), encoding="utf-8")
        print(f"written: {page_path}")
    raise typer.Exit(1 if any(record.wrong for record in done) else 0)


def _names(what: str, given: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown {what} {name}; there are {', '.join(known)}")
    return names


def _threads(given: str) -> list[int]:
    """Numbers of threads, each once; 'all' are as many as this process may run on."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if any(name != "all" and not name.isdigit() for name in names):
        raise typer.BadParameter("--threads has numbers, or all")
    return list(dict.fromkeys(len(os.sched_getaffinity(0)) if name == "all" else int(name) for name in names))


def _run(asked: list[Cell], backends: Sequence[str], limit: float, seconds: float, again: bool) -> list[Record]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    done: list[Record] = []
    with Progress(*columns, console=console, transient=True) as shown:
        bar = shown.add_task("", total=len(asked))
        for record, is_new in campaign.run(
            asked,
            backends,
            Effort(),
            path=PATH,
            limit=limit,
            end=time.monotonic() + seconds,
            again=again,
            command=" ".join(["python -m benchmarks.operators", *sys.argv[1:]]),
            say=lambda cell: shown.update(bar, description=str(cell)[:60]),
        ):
            done.append(record)
            shown.advance(bar)
            if is_new and not console.is_terminal and not record.left_out_for:
                console.print(_line(record), markup=False, highlight=False, soft_wrap=True)
    return done


def _line(record: Record) -> str:
    """One cell for a log."""
    known = ratio(record, BASE)
    if known is None:
        return f"{record.cell}: {record.failure or 'not measured'}"
    times = ", ".join(f"{name} {1000 * figures.ms:.0f} µs" for name, figures in record.figures.items())
    wrong = f", WRONG: {record.wrong}" if record.wrong else ""
    return f"{record.cell}: {times}, kiln/eager {known.median:.2f} ± {percent(known.spread)}{wrong}"


def _show(done: Sequence[Record], every: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title="All cells" if every else "Slower than eager")
    for title in LOSS_TITLES:
        table.add_column(title)
    for record in [record for record in done if record.is_measured] if every else losses(done):
        table.add_row(*loss_row(record))
    console.print(table)
    for record in done:
        if record.failure or record.wrong:
            console.print(f"{record.cell}: {record.failure or 'wrong: ' + record.wrong}", markup=False, style="red")
    line = summary("all", done)
    peer = f", {line.at_least_peer} of {line.with_peer} not slower than inductor" if line.with_peer else ""
    left_out = sum(bool(record.left_out_for) for record in done)
    console.print(
        f"{counted(line.cells, 'cell')} measured, {left_out} left out; {line.losses} slower than eager,"
        f" {line.overheads} of them by overhead alone{peer}; time of kiln / eager {line.times:.2f} in geometric mean"
    )


if __name__ == "__main__":
    typer.run(main)
