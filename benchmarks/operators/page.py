"""docs/operators.md: how many cells there are, and those that are slower than eager, the worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.operators.judge import MICROSECONDS, SHARE, is_overhead, losses, ratio, summaries
from benchmarks.operators.records import Record
from torchkiln.bench.load import summary as load_summary
from torchkiln.bench.page import markdown_table
from torchkiln.bench.records import BASE, OURS, PEER, percent

_METHOD = f"""\
Every cell is one operator, or a program of a few, in one layout of its first operand. It is compiled by kiln, which
may neither fall back to eager nor choose it for being faster, and compared with eager, values included. Backward is the
forward call and the gradients of all its inputs. Backends run in one process in rounds that take turns, so that noise
of the machine hits all alike. On one thread times are those that the thread had a processor. A ratio is ours to
eager's of the same round, the median of all rounds; ± is half the distance between the quartiles. The C library keeps
freed memory, so that no call pays for pages that another one gave back.

A loss is a cell that takes more than {SHARE:.0%} and {MICROSECONDS:.0f} µs longer, by the median and by the fastest
round of each. Overhead is what a compiled call takes longer with nothing to compute, after as much memory as the cell
has passed through the caches; a loss that is not one without it is
marked. Externs are calls of torch's operators in the compiled graphs. Calls that take eager less than 40 µs or more
than 0.3 s are left out.
"""

LOSS_TITLES = ("entry", "cell", "sizes", "eager µs", "kiln µs", "ratio", "±", "fastest", "overhead µs", "externs")
_WORDS = ("entry", "cell", "sizes", "externs", "note", "reason", "")


def page(records: Sequence[Record], asked: int) -> str:
    """The page as Markdown; ``asked`` is how many cells there would be if all had been taken."""
    parts = [
        "# Operators against eager",
        "This page is written by `make bench-operators` from its records.",
        "## Where and how",
        _facts(records, asked),
        _METHOD.strip(),
        "## Summary",
        _summary(records),
        "## Slower than eager",
        _losses(records, BASE),
        *_against_peer(records),
        "## Failures",
        _failures(records),
        "## Left out",
        _left_out(records),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(records: Sequence[Record], asked: int) -> str:
    def each(values: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(value for value in values if value)) or "not known"

    rows = [
        ("machine", each(record.machine for record in records)),
        ("versions", each(", ".join(f"{k} {v}" for k, v in record.versions.items()) for record in records)),
        ("date", each(sorted({record.day for record in records}))),
        ("command", each(f"`{record.command}`" for record in records if record.command)),
        ("digest of the sources", each(record.source for record in records)),
        ("cells taken so far", f"{len(records)} of {asked}"),
        ("load of the machine", load_summary(record.load for record in records if record.is_measured)),
    ]
    return markdown_table(("", " "), rows, words=("", " "))


def _summary(records: Sequence[Record]) -> str:
    found = summaries(records)
    has_peer = any(line.with_peer for line in found)
    titles = ["cells of", "measured", "slower than eager", "by overhead alone", "time of kiln / eager, mean"]
    rows = []
    for line in found:
        share = f"{line.losses} ({line.losses / line.cells:.1%})"
        row = [line.name, str(line.cells), share, str(line.overheads), f"{line.times:.2f}"]
        if has_peer:
            row.append(f"{line.at_least_peer / line.with_peer:.1%} of {line.with_peer}" if line.with_peer else "")
        rows.append(row)
    return markdown_table([*titles, *([f"not slower than {PEER}"] if has_peer else [])], rows, words=("cells of",))


def loss_row(record: Record, other: str = BASE) -> tuple[str, ...]:
    """Under ``LOSS_TITLES``."""
    known = ratio(record, other)
    assert known is not None
    ours = record.figures[OURS]
    explained = other == BASE and known.is_loss and is_overhead(record)
    overhead = f"{record.overhead_us:.0f}{', explains it' if explained else ''}"
    return (
        record.cell.entry,
        record.cell.kind,
        record.sizes,
        f"{1000 * record.figures[other].ms:.0f}",
        f"{1000 * ours.ms:.0f}",
        f"{known.median:.2f}",
        percent(known.spread),
        f"{known.fastest:.2f}",
        overhead,
        ", ".join(f"{name} × {count}" if count > 1 else name for name, count in ours.externs.items()),
    )


def _losses(records: Sequence[Record], other: str) -> str:
    lost = losses(records, other)
    if not lost:
        return "None."
    titles = [title.replace("eager", other) for title in LOSS_TITLES]
    return markdown_table(titles, [loss_row(record, other) for record in lost], words=_WORDS)


def _against_peer(records: Sequence[Record]) -> list[str]:
    if not any(PEER in record.figures for record in records):
        return []
    return [f"## Slower than {PEER.capitalize()}", _losses(records, PEER)]


def _failures(records: Sequence[Record]) -> str:
    """What ours did not compile, and results that differ from eager's."""
    rows = [(str(record.cell), record.sizes, record.failure or record.wrong) for record in records]
    rows = [row for row in rows if row[2]]
    return markdown_table(("cell", "sizes", "reason"), rows, words=("cell", *_WORDS)) if rows else "None."


def _left_out(records: Sequence[Record]) -> str:
    """How many cells for which reason; those of one time or one message of eager's count as one reason."""
    reasons = Counter(_kind_of(record.left_out_for) for record in records if record.left_out_for)
    rows = [(reason, str(count)) for reason, count in reasons.most_common()]
    return markdown_table(("reason", "cells"), rows, words=_WORDS) if rows else "None."


def _kind_of(reason: str) -> str:
    if reason.startswith("eager takes"):
        return "eager takes too short or too long"
    return reason.partition(":")[0]
