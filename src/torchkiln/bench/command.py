"""``kiln bench`` itself: chooses the cells, measures what is not on record, shows and writes the results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchkiln.bench.backends import BACKENDS
from torchkiln.bench.cells import Cell, Job, Precision, Shapes, cells
from torchkiln.bench.entries import ENTRIES
from torchkiln.bench.interleave import QUICK, Effort, measure
from torchkiln.bench.records import Record, append, is_current, new_record, read
from torchkiln.bench.table import cells_table, summary_table
from torchkiln.errors import OptionError

Choice = TypeVar("Choice", bound=StrEnum)


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
    """Names with commas to cells; a group ("models", "small", "functions") stands for its entries."""
    chosen = [name for asked in _names(models) for name in _entries(asked)] if models else list(ENTRIES)
    for name in _names(backends):
        if name not in BACKENDS:
            raise OptionError.unknown("backend", name, BACKENDS)
        if BACKENDS[name].missing:
            raise OptionError(f"Backend {name!r} needs packages that are not installed: {BACKENDS[name].missing[0]}.")
    wanted = cells(
        [(name, ENTRIES[name].jobs) for name in dict.fromkeys(chosen)],
        _choices(jobs, Job),
        _choices(precisions, Precision),
        _choices(shapes, Shapes),
    )
    effort = QUICK if quick else Effort()
    return Request(tuple(wanted), tuple(_names(backends)), effort, threads or len(os.sched_getaffinity(0)))


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _entries(name: str) -> list[str]:
    group = [entry.name for entry in ENTRIES.values() if entry.group == name]
    if not group and name not in ENTRIES:
        raise OptionError.unknown("model", name, [*ENTRIES, *{entry.group for entry in ENTRIES.values()}])
    return group or [name]


def _choices(given: str, kind: type[Choice]) -> list[Choice]:
    values = {str(member.value): member for member in kind}
    for name in _names(given):
        if name not in values:
            raise OptionError.unknown(kind.__name__.lower(), name, values)
    return [values[name] for name in _names(given)]


def run(asked: Request, output: Path, *, resume: bool, console: Console) -> list[Record]:
    """Measure every cell, show progress, keep each record as soon as it is there; the records asked for, in order."""
    known = {record.cell: record for record in read(output)} if resume else {}
    done: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(asked.cells))

        def say(text: str) -> None:
            progress.update(task, description=text)

        for cell in asked.cells:
            backends = [name for name in asked.backends if cell.job in BACKENDS[name].jobs]
            record = known.get(cell)
            if record is None or not is_current(record, backends):
                record = new_record(cell, measure(cell, backends, asked.effort, asked.threads, say))
                append(output, record)
                if not console.is_terminal:
                    console.print(_line(record))
            done.append(record)
            progress.advance(task)
    return done


def _line(record: Record) -> str:
    figures = ", ".join(
        f"{name} {f.failure or f'{f.ms:.3f} ms (first {f.first_seconds:.2f} s)'}" for name, f in record.figures.items()
    )
    return f"{record.cell}: {figures}"


def show(records: Sequence[Record], console: Console) -> None:
    console.print(cells_table(records))
    console.print(summary_table(records))


def failures(records: Iterable[Record]) -> list[str]:
    """What our own backend did not get through."""
    return [
        f"{record.cell}: {name}: {figures.failure}"
        for record in records
        for name, figures in record.figures.items()
        if figures.failure and name.startswith("kiln")
    ]
