"""``kiln bench`` itself: chooses the cells, measures what is not on record, shows and writes the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchkiln.bench.backends import BACKENDS
from torchkiln.bench.cells import Cell, Job, Precision, Shapes, cells
from torchkiln.bench.entries import ENTRIES, SERVING_GROUP
from torchkiln.bench.html_plot import html_plot
from torchkiln.bench.interleave import QUICK, Effort, measure
from torchkiln.bench.page import page
from torchkiln.bench.plot import picture, points
from torchkiln.bench.profile import profile
from torchkiln.bench.profile_table import profile_tables
from torchkiln.bench.records import Record, append, is_current, new_record, percent, read
from torchkiln.bench.table import cells_table, summary_table, targets_table
from torchkiln.errors import KilnError, OptionError

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True)
class Request:
    """What was asked for, checked."""

    cells: tuple[Cell, ...]
    backends: tuple[str, ...]
    effort: Effort
    threads: int


def request(
    models: str, backends: str, jobs: str, precisions: str, shapes: str, *, quick: bool, threads: int
) -> Request:
    """Names with commas to cells; a group ("models", "small", "functions", "serving") stands for its entries.

    Without names it is all of them but those of serving.
    """
    groups = dict.fromkeys(entry.group for entry in ENTRIES.values())
    known = {group: [name for name, entry in ENTRIES.items() if entry.group == group] for group in groups}
    usual = [name for name, entry in ENTRIES.items() if entry.group != SERVING_GROUP]
    chosen = _chosen("model", models, {**{name: [name] for name in ENTRIES}, **known}) if models else usual
    for name in chosen:
        if ENTRIES[name].missing:
            raise OptionError(
                f"Model {name!r} needs {ENTRIES[name].missing[0]}, which is not installed; install it with: pip install"
                " 'torchkiln[bench]', or leave it out with: --models small,functions."
            )
    compared = _chosen("backend", backends, {name: [name] for name in BACKENDS})
    for name in compared:
        if BACKENDS[name].missing:
            raise OptionError(
                f"Backend {name!r} needs packages that are not installed; install them with: pip install"
                f" {' '.join(BACKENDS[name].missing)}."
            )
    wanted = cells(
        [(name, ENTRIES[name].jobs) for name in chosen],
        _chosen("job", jobs, {job.value: [job] for job in Job}),
        _chosen("precision", precisions, {precision.value: [precision] for precision in Precision}),
        _chosen("shapes", shapes, {shape.value: [shape] for shape in Shapes}),
    )
    effort = QUICK if quick else Effort()
    return Request(tuple(wanted), tuple(compared), effort, threads or len(os.sched_getaffinity(0)))


def _chosen(what: str, given: str, known: Mapping[str, Sequence[Choice]]) -> list[Choice]:
    """What these names with commas stand for, each once."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise OptionError(f"Give at least one {what} of: {', '.join(known)}.")
    for name in names:
        if name not in known:
            raise OptionError.unknown(what, name, known)
    return list(dict.fromkeys(choice for name in names for choice in known[name]))


def run(asked: Request, output: Path, *, resume: bool, console: Console, command: str = "") -> list[Record]:
    """Measure every cell, show progress, keep each record as soon as it is there; the records asked for, in order.

    ``resume`` leaves out what is on record already and reliable. ``command`` is what was typed, for the record.
    """
    known = {record.cell: record for record in read(output)} if resume else {}
    done: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(asked.cells))

        def say(text: str) -> None:
            progress.update(task, description=text)

        for cell in asked.cells:
            backends = [name for name in asked.backends if BACKENDS[name].takes(cell)]
            record = known.get(cell)
            if record is None or not is_current(
                record, backends, asked.threads, rounds=asked.effort.rounds, seconds=asked.effort.seconds
            ):
                found = measure(cell, backends, asked.effort, asked.threads, say)
                record = new_record(cell, found.figures, asked.threads, command, asked.effort.seconds, found.load)
                append(output, record)
                if not console.is_terminal:
                    console.print(_line(record), markup=False, soft_wrap=True)
            done.append(record)
            progress.advance(task)
    return done


def _line(record: Record) -> str:
    """One cell for a log: times with their spreads, and what else the machine did."""
    parts = [
        f"{name} {f.failure or f'{f.ms:.3f} ms ± {percent(f.spread)} (first {f.first_seconds:.2f} s)'}"
        for name, f in record.figures.items()
    ]
    left_out = record.left_out()
    said = [f"left out for their spread: {', '.join(left_out)}"] if left_out else []
    return f"{record.cell}: {'; '.join([', '.join(parts), *said, str(record.load)])}"


def recorded(asked: Request, output: Path) -> list[Record]:
    """What is on record of the cells asked for, whatever it was taken with."""
    found = {record.cell: record for record in read(output)}
    return [found[cell] for cell in asked.cells if cell in found]


def show(records: Sequence[Record], console: Console) -> None:
    console.print(cells_table(records))
    console.print(summary_table(records))
    console.print(targets_table(records))


def write(records: Sequence[Record], console: Console, *, plots: Path | None, page_path: Path | None) -> None:
    """The plot as a picture and as HTML beside ``plots``, and the page, which shows the picture where there is one."""
    drawn: bytes | None = None
    if plots is not None and points(records):
        try:
            drawn = picture(records)
        except KilnError as error:  # no matplotlib
            console.print(str(error), markup=False)
        else:
            _write(plots.with_suffix(".png"), drawn, console)
            _write(plots.with_suffix(".html"), html_plot(records).encode(), console)
    if page_path is not None:
        shown = page_path.with_suffix(".png")
        _write(page_path, page(records, None if drawn is None else shown.name).encode(), console)
        if drawn is not None:
            _write(shown, drawn, console)


def _write(path: Path, content: bytes, console: Console) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    console.print(f"written: {path}")


def show_profiles(asked: Request, console: Console) -> bool:
    """Where the time of a step goes, for each cell; False, with a message, where one cannot be compiled."""
    torch.set_num_threads(asked.threads)
    for cell in asked.cells:
        try:
            with console.status(str(cell)) as status:
                # Half of what a backend has in a comparison of three.
                found = profile(cell, seconds=asked.effort.together / 6, say=status.update)
        except KilnError as error:
            console.print(str(error), style="red", markup=False)
            return False
        console.print(profile_tables(found))
    return True


def failures(records: Iterable[Record]) -> list[str]:
    """What our own backend did not get through."""
    return [
        f"{record.cell}: {name}: {figures.failure}"
        for record in records
        for name, figures in record.figures.items()
        if figures.failure and name.startswith("kiln")
    ]
