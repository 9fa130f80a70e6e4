"""A page of results: where and how it was measured, the targets, the losses, and every cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torchkiln.bench.interleave import Effort
from torchkiln.bench.load import summary
from torchkiln.bench.records import BASE, LARGEST_ERROR, OURS, PEER, Figures, Record, percent, uncertainty
from torchkiln.bench.summary import SUMMARY_TITLES, SUMMARY_WORDS, summaries
from torchkiln.bench.table import notes
from torchkiln.bench.targets import Ratio, first_call, outcomes, peak, peak_of_steps, speed

_METHOD = """\
Every backend runs each cell in a process of its own, with empty caches. The first call of each, which compiles, is
made one after the other. Then all of them take rounds of steps in turns, every other round in the opposite order, so
that noise of the machine hits all alike. A round's figure is the median of its steps, a cell's the median of its
rounds; ± is half the distance between the quartiles of the rounds. Rounds go on, until 24 s in all, where they differ
so much that the standard error of a median is above 3 %; slow steps have five rounds whatever they show. Where the
standard error of one is above 25 %, they go on until 96 s, and a cell that is no better then is left out of speed-ups,
means and targets and listed below. Steps of training are forward, backward and the release of the gradients. "Dynamic"
is compiled for symbolic sizes and first called with other sizes than those that are timed. Speed-ups above 1 are
faster; first calls and memory below 1 are less. "Others" is the share of processor time that went to other programs
during the rounds.

Memory is resident memory. "Of process" is the peak of the process from its start, compiling included, as the system
keeps it; "of steps" is that peak of steps alone, after the first call. "Peak MiB" counts the processes it starts to
compile too: the most that was seen in the first call, every 0.2 s, of the process and of the pages that only processes
it started hold. It is at least "of process".
"""


@dataclass(frozen=True)
class Column:
    """A column of the table of cells: a figure, and with ``relative`` also what it is relative to eager."""

    title: str
    text: Callable[[Figures], str]
    relative: Ratio | None = None


# Later figures (a warm first call, another device) are columns more.
COLUMNS = (
    Column("ms/step", lambda f: f"{f.ms:.3f}", speed),
    Column("±", lambda f: percent(f.spread)),
    Column("first call s", lambda f: f"{f.first_seconds:.2f}", first_call),
    Column("peak MiB", lambda f: f"{f.peak_mib:.0f}", peak),
    Column("of process", lambda f: f"{f.process_mib:.0f}"),
    Column("of steps", lambda f: f"{f.step_mib:.0f}", peak_of_steps),
)


def page(records: Sequence[Record], picture: str | None = None) -> str:
    """The page as Markdown; ``picture`` is the address of the plot, as the page is to refer to it."""
    seen = [f"![speed-up over eager against seconds of the first call, a point for each cell]({picture})"]
    parts = [
        "# Benchmarks",
        "This page is written by `kiln bench --page` from its records.",
        "## Where and how",
        _facts(records),
        _METHOD.strip(),
        "## Targets",
        _targets(records),
        "## Geometric means over cells",
        _means(records),
        *(seen if picture else []),
        "## Losses",
        _losses(records),
        "## Too close to call",
        _close_calls(records),
        "## Left out",
        _left_out(records),
        "## Cells",
        _cells(records),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(records: Sequence[Record]) -> str:
    def each(values: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(value for value in values if value)) or "not known"

    days = sorted({record.day for record in records})
    commands = dict.fromkeys(f"`{record.command}`" for record in records if record.command)
    return markdown_table(
        ("", ""),
        [
            ("machine", each(record.machine for record in records)),
            ("threads of torch", each(str(record.threads or "") for record in records)),
            ("versions", each(", ".join(f"{k} {v}" for k, v in record.versions.items()) for record in records)),
            ("date", each((days[0], days[-1])).replace("; ", " to ") if days else "not known"),
            ("command", each(commands)),
            ("digest of the sources", each(record.source for record in records)),
            ("cells", str(len(records))),
            ("load of the machine", summary(record.load for record in records)),
        ],
        words=("",),
    )


def _targets(records: Sequence[Record]) -> str:
    found = list(outcomes(records))
    rows = [(o.target, o.word, o.figure, str(len(o.misses)) if o.misses else "") for o in found]
    titles = ("target", "result", "figure", "cells that miss it")
    parts = [markdown_table(titles, rows, words=titles)]
    for outcome in found:
        if outcome.misses:
            parts.append(f"Missed, {outcome.target}:")
            parts.append("\n".join(f"- {escaped(miss)}" for miss in outcome.misses))
    return "\n\n".join(parts)


def _means(records: Sequence[Record]) -> str:
    """Over all cells, and over each kind of them where there are several."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.cell.kind, []).append(record)
    groups = {"all": records, **(kinds if len(kinds) > 1 else {})}
    rows = [(kind, *line.row) for kind, group in groups.items() for line in summaries(group)]
    return markdown_table(("kind", *SUMMARY_TITLES), rows, words=("kind", *SUMMARY_WORDS))


def _losses(records: Sequence[Record]) -> str:
    """Cells in which ours is slower than eager or the peer, or failed; the slowest first.

    The fastest rounds beside the medians tell a loss from noise of the machine.
    """
    lost: list[tuple[float, tuple[str, ...]]] = []
    for record in records:
        ours = record.figures.get(OURS)
        if ours is None:
            continue
        if ours.failure:
            lost.append((0.0, (str(record.cell), "failed", "failed", "", "", "", ours.failure)))
            continue
        speedups = [record.speedup(OURS, other) for other in (BASE, PEER)]
        known = [speedup for speedup in speedups if speedup is not None]
        if known and min(known) < 1:
            best = [record.best_speedup(OURS, other) for other in (BASE, PEER)]
            texts = ["" if speedup is None else f"{speedup:.2f}" for speedup in (*speedups, *best)]
            lost.append((min(known), (str(record.cell), *texts, percent(ours.spread), notes(ours))))
    if not lost:
        measured = [name for name in (BASE, PEER) if any(name in record.figures for record in records)]
        but = " in the cells that are not left out" if any(record.left_out() for record in records) else ""
        return f"None: {OURS} is nowhere slower than {' or '.join(measured) or 'others'}{but}, and failed nowhere."
    rows = [row for _, row in sorted(lost)]
    titles = (f"× {BASE}", f"× {PEER}", f"fastest × {BASE}", f"fastest × {PEER}", "±")
    remark = f"By medians, and by the fastest round of each; ± is the spread of {OURS}'s rounds."
    return remark + "\n\n" + markdown_table(("cell", *titles, "notes"), rows, words=("cell", "notes"))


def _close_calls(records: Sequence[Record]) -> str:
    """Cells whose speed-up is within two standard errors of 1, wins and losses alike, and how certain medians are."""
    rows = []
    errors: list[float] = []
    for record in records:
        known = {name: uncertainty(f.rounds) for name, f in record.figures.items() if not f.failure}
        errors.extend(known.values())
        for other in (BASE, PEER):
            speedup = record.speedup(OURS, other)
            if speedup is None:
                continue
            error = speedup * math.hypot(known[OURS], known[other])
            if abs(speedup - 1) < 2 * error:
                text = f"{error:.3f}" if error < math.inf else "unknown"
                rows.append((str(record.cell), other, f"{speedup:.3f}", text))
    good = sum(error <= Effort.certain for error in errors)
    certain = (
        f"Of {len(errors)} medians, {good} have a standard error of at most {Effort.certain:.0%}, by the quartiles of "
        "their rounds as if those were independent."
    )
    if not rows:
        return f"{certain} No speed-up is within two standard errors of 1."
    table = markdown_table(("cell", "against", "speed-up", "standard error"), rows, words=("cell", "against"))
    return f"{certain} Speed-ups within two standard errors of 1, which may be wins or losses:\n\n{table}"


def _left_out(records: Sequence[Record]) -> str:
    """Unreliable times, and what the machine did meanwhile."""
    rows = [
        (
            str(record.cell),
            name,
            f"{figures.ms:.3f}",
            percent(figures.spread),
            percent(uncertainty(figures.rounds)),
            str(len(figures.rounds)),
            str(record.load),
        )
        for record in records
        for name, figures in record.figures.items()
        if name in record.left_out()
    ]
    if not rows:
        return f"None: no median has a standard error above {LARGEST_ERROR:.0%}."
    remark = f"Their rounds differ so much that the standard error of the median is above {LARGEST_ERROR:.0%}."
    titles = ("cell", "backend", "ms/step", "±", "standard error", "rounds", "load of the machine")
    return remark + "\n\n" + markdown_table(titles, rows, words=("cell", "backend", "load of the machine"))


def _cells(records: Sequence[Record]) -> str:
    titles = [title for c in COLUMNS for title in ((c.title, "× eager") if c.relative else (c.title,))]
    rows = []
    for record in records:
        base = record.figures.get(BASE)
        for k, (name, figures) in enumerate(record.figures.items()):
            names = (record.cell.entry, record.cell.kind) if k == 0 else ("", "")
            others = percent(record.load.others) if k == 0 and record.load.others is not None else ""
            said = f"failed: {figures.failure}" if figures.failure else notes(figures)
            rows.append((*names, name, *_figures(figures, base), others, said))
    words = ("entry", "cell", "backend")
    return markdown_table((*words, *titles, "others", "notes"), rows, words=(*words, "notes"))


def _figures(figures: Figures, base: Figures | None) -> list[str]:
    texts: list[str] = []
    for column in COLUMNS:
        texts.append("" if figures.failure else column.text(figures))
        if column.relative is None:
            continue
        known = base is not None and not base.failure and not figures.failure
        ratio = column.relative(figures, base) if base is not None and known else None
        texts.append("" if ratio is None else f"{ratio:.2f}")
    return texts


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, words: Collection[str]) -> str:
    """``words`` are the columns of text; the others, of figures, stand to the right."""
    rules = ["---" if title in words else "---:" for title in titles]
    lines = [titles, rules, *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
