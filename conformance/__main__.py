"""The command: check operators, show how far it is, write the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from conformance import records, table, workers
from conformance.cases import DTYPES, Case, cases
from conformance.check import CATEGORIES, PASSED
from conformance.records import Record

app = typer.Typer(add_completion=False)
console = Console()


@app.command()
def main(
    ops: Annotated[str, typer.Option(help="operators, separated by commas (default: all)")] = "",
    dtypes: Annotated[str, typer.Option(help="dtypes, separated by commas")] = ",".join(DTYPES),
    backend: Annotated[str, typer.Option(help="the backend to check")] = "kiln",
    sample: Annotated[int, typer.Option(help="only so many pairs of operator and dtype, always the same ones")] = 0,
    each: Annotated[int, typer.Option(help="only so many samples of each pair, always the same ones")] = 0,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="compile with symbolic sizes")] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="change the layout of what every operator is given by force")
    ] = False,
    number: Annotated[int, typer.Option("--workers", help="processes")] = 2,
    limit: Annotated[float, typer.Option(help="seconds for one sample")] = 60.0,
    again: Annotated[bool, typer.Option(help="also what is on record for these sources already")] = False,
    failed: Annotated[bool, typer.Option(help="only what did not pass when last run, whatever the sources")] = False,
    any_sources: Annotated[
        bool, typer.Option("--any-sources", help="take what is on record for other sources too; the page says so")
    ] = False,
    write_table: Annotated[bool, typer.Option("--table", help="write docs/conformance.md from the records")] = False,
) -> None:
    """Compile every operator of torch's database with every dtype and sample input, and compare with eager.

    With --table and another backend, kiln is run on the same samples too, and docs/conformance.md gets a section with
    both.
    """
    if layouts and write_table:
        raise typer.BadParameter("docs/conformance.md is about layouts as they are; leave out --layouts or --table")
    choice = workers.Choice(each or None, dynamic, layouts)
    run = partial(_run, choice=choice, number=number, limit=limit)
    whole = chosen = _choose(ops, dtypes, sample)
    if failed:
        before = records.read(backend, any_source=True)
        chosen = [c for c in chosen if (c, str(choice)) in before and _not_passed(before[c, str(choice)])]
    done = _records(chosen, backend, choice, run, again, any_sources)
    if write_table and backend == table.OURS:
        known = records.read(backend, any_source=any_sources)
        page = [known[c, str(choice)] for c in whole if (c, str(choice)) in known]
        console.print(f"written: {table.write(page, options=_options(ops, dtypes, sample, each, dynamic))}")
    elif write_table:
        ours = _records(chosen, table.OURS, choice, run, again)
        command = f"--backend {backend} {_options(ops, dtypes, sample, each, dynamic)}".strip()
        console.print(f"written: {table.write_comparison(ours, done, backend=backend, options=command)}")
    if any(record.counts["wrong"] or record.counts["crashed"] for record in done):
        raise typer.Exit(1)


def _records(
    chosen: list[Case],
    backend: str,
    choice: workers.Choice,
    run: Callable[[list[Case], str], None],
    again: bool,
    any_sources: bool = False,
) -> list[Record]:
    """The records of ``chosen``, made now where there are none."""
    known = {} if again else records.read(backend, any_source=any_sources)
    todo = [c for c in chosen if (c, str(choice)) not in known]
    console.print(f"{backend}: {len(chosen)} pairs of operator and dtype, {len(chosen) - len(todo)} on record already")
    if todo:
        run(todo, backend)
    found = records.read(backend, any_source=any_sources)
    done = [found[c, str(choice)] for c in chosen if (c, str(choice)) in found]
    _summary(done)
    return done


def _options(ops: str, dtypes: str, sample: int, each: int, dynamic: bool) -> str:
    """What was asked for, as one would type it again."""
    given = [("--ops", ops), ("--dtypes", "" if dtypes == ",".join(DTYPES) else dtypes)]
    given += [("--sample", str(sample or "")), ("--each", str(each or ""))]
    return " ".join([f"{name} {value}" for name, value in given if value] + (["--dynamic"] if dynamic else []))


def _choose(ops: str, dtypes: str, sample: int) -> list[Case]:
    names = [name for name in ops.split(",") if name]
    kinds = [name for name in dtypes.split(",") if name]
    unknown = [name for name in kinds if name not in DTYPES]
    if unknown:
        raise typer.BadParameter(f"unknown dtype {unknown[0]}; there are {', '.join(DTYPES)}")
    chosen = cases(names, kinds)
    if not chosen:
        raise typer.BadParameter(f"no operator of the database is called {ops}")
    if sample and sample < len(chosen):
        keep = set(random.Random(0).sample(chosen, sample))
        chosen = [c for c in chosen if c in keep]
    return chosen


def _run(todo: list[Case], backend: str, *, choice: workers.Choice, number: int, limit: float) -> None:
    totals = dict.fromkeys(CATEGORIES, 0)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("starting", total=len(todo))

        def report(record: Record) -> None:
            records.append(record)
            for category, count in record.counts.items():
                totals[category] += count
            if _not_passed(record):
                counts = ", ".join(f"{n} {c}" for c, n in record.counts.items() if n)
                reason = next(v["reason"] for v in record.verdicts if v["category"] != PASSED)
                shown.console.print(f"{record.case}: {counts}: {reason[:160]}", highlight=False, markup=False)
            shown.advance(bar)

        def progress(_worker: int, case: Case, _samples: int) -> None:
            text = " ".join(f"{c} {n}" for c, n in totals.items() if n)
            shown.update(bar, description=f"{text} · {str(case)[:40]:<40}")

        workers.run(todo, backend=backend, choice=choice, workers=number, limit=limit, report=report, progress=progress)


def _not_passed(record: Record) -> bool:
    return any(count for category, count in record.counts.items() if category != PASSED)


def _summary(done: list[Record]) -> None:
    totals = {category: sum(r.counts[category] for r in done) for category in CATEGORIES}
    console.print(", ".join(f"{category} {count}" for category, count in totals.items()))


if __name__ == "__main__":
    app()
