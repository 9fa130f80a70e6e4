"""docs/conformance.md from the records."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from conformance.cases import DTYPES, RANDOM, UNWRITTEN
from conformance.check import CATEGORIES, PASSED, ROUNDED
from conformance.records import ROOT, Record

PAGE = ROOT / "docs" / "conformance.md"


def write(records: Sequence[Record], *, choice: str, backend: str) -> Path:
    path = PAGE if backend == "kiln" else PAGE.with_name(f"conformance-{backend}.md")
    path.write_text(text([r for r in records if r.chosen == choice], backend, choice))
    return path


def text(records: Sequence[Record], backend: str, choice: str = "all") -> str:
    """The page. ``make conformance`` writes it; nothing in it is written by hand."""
    parts = [_head(records, backend, choice), _totals(records), _by_dtype(records), _not_passed(records)]
    if backend == "kiln":
        parts += [_kinds(records)]
    parts += [_metadata_only(records)]
    return "\n\n".join(parts) + "\n"


def _head(records: Sequence[Record], backend: str, choice: str) -> str:
    operators = len({r.operator for r in records})
    samples = sum(sum(r.counts.values()) for r in records)
    which = "Every sample input" if choice == "all" else f"A fixed choice of samples ({choice} operator and dtype)"
    return (
        "# Conformance\n\n"
        f"{which} of torch's operator database, compiled by `{backend}` with `fullgraph=True` and compared"
        " with eager: values, dtypes, sizes, strides, what is left in the arguments, and gradients.\n"
        f"torch {torch.__version__}, CPU; {operators} operators, {len(records)} pairs of operator and dtype,"
        f" {samples} samples. Written by `make conformance`.\n\n"
        "Values are equal when `torch.testing.assert_close` says so with its default tolerances. Where it does not,"
        " both are compared with a float64 run of eager, and ours must be about as near to it as eager's (within the"
        " default tolerance, or twice eager's largest error and one unit in the last place).\n\n"
        "- **wrong**: another result than eager's\n"
        "- **crashed**: an unexpected error while compiling or running, a dead process, or the time limit\n"
        "- **not compiled**: declined with a reason; by default such a graph runs eagerly after a warning\n"
        "- **capture failed**: Dynamo or AOTAutograd could not capture the call, capture itself changed the result,"
        " or eager fails"
    )


def _totals(records: Sequence[Record]) -> str:
    totals = {c: sum(r.counts[c] for r in records) for c in CATEGORIES}
    whole = max(1, sum(totals.values()))
    judged = sum("judged by float64" in v["note"] for r in records for v in r.verdicts)
    lines = ["## Totals", "", "| | samples | share |", "|---|---:|---:|"]
    lines += [f"| {c} | {n} | {100 * n / whole:.2f} % |" for c, n in totals.items()]
    rounded = sum(ROUNDED in v["note"] for r in records for v in r.verdicts)
    lines += [
        "",
        f"{judged} of the samples that passed were judged by the float64 run.",
        f"{rounded} of bfloat16 and float16 are eager's results with `precision='eager'` alone, which rounds after",
        "every operation: eager's own roundings happen to cancel in them.",
    ]
    return "\n".join(lines)


def _by_dtype(records: Sequence[Record]) -> str:
    lines = ["## By dtype", "", "| dtype | " + " | ".join(CATEGORIES) + " |", "|---|" + "---:|" * len(CATEGORIES)]
    for dtype in DTYPES:
        found = [r for r in records if r.dtype == dtype]
        if found:
            lines.append(f"| {dtype} | " + " | ".join(str(sum(r.counts[c] for r in found)) for c in CATEGORIES) + " |")
    return "\n".join(lines)


def _not_passed(records: Sequence[Record]) -> str:
    lines = ["## Not passed", ""]
    for category in CATEGORIES[1:]:
        rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        reasons: dict[str, str] = {}
        for record in records:
            for verdict in record.verdicts:
                if verdict["category"] == category:
                    rows[record.operator][record.dtype] += 1
                    reasons.setdefault(record.operator, _plain(verdict["reason"]))
        if not rows:
            lines += [f"No sample is in the category *{category}*.", ""]
            continue
        lines += [f"### {category.capitalize()}", "", "| operator | samples | reason (of the first) |", "|---|---|---|"]
        for operator in sorted(rows):
            counts = ", ".join(f"{dtype} {n}" for dtype, n in rows[operator].items())
            lines.append(f"| `{operator}` | {counts} | {reasons[operator]} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _plain(reason: str) -> str:
    """A reason as one table cell, without paths of the machine it was found on."""
    reason = re.sub(r"(/[\w.@+-]+)+/([\w.-]+\.py)", r"\2", reason)
    return reason.replace("|", "\\|").replace("<", "&lt;")[:220]


def _kinds(records: Sequence[Record]) -> str:
    kernels: dict[str, int] = defaultdict(int)
    externs: dict[str, set[str]] = defaultdict(set)
    for record in records:
        kernels[record.operator] += record.kernels
        externs[record.operator] |= set(record.externs)
    generated = sorted(o for o in kernels if kernels[o] and not externs[o])
    mixed = sorted(o for o in kernels if kernels[o] and externs[o])
    called = sorted(o for o in kernels if not kernels[o] and externs[o])
    neither = sorted(o for o in kernels if not kernels[o] and not externs[o])
    lines = ["## How operators ran", "", "Over all dtypes and samples, forward and backward together.", ""]
    lines += [f"### As generated code alone ({len(generated)})", "", _names(generated), ""]
    lines += [f"### As generated code and calls into torch ({len(mixed)})", "", "| operator | calls |", "|---|---|"]
    lines += [f"| `{o}` | {_calls(externs[o])} |" for o in mixed]
    lines += ["", f"### As calls into torch alone ({len(called)})", "", "| operator | calls |", "|---|---|"]
    lines += [f"| `{o}` | {_calls(externs[o])} |" for o in called]
    lines += ["", f"### Neither: views, constants, or nothing compiled ({len(neither)})", "", _names(neither)]
    return "\n".join(lines)


def _names(operators: Sequence[str]) -> str:
    return ", ".join(f"`{o}`" for o in operators) or "none"


def _calls(names: set[str]) -> str:
    return ", ".join(f"`{n.removeprefix('aten.')}`" for n in sorted(names))


def _metadata_only(records: Sequence[Record]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for record in records:
        for verdict in record.verdicts:
            if verdict["category"] == PASSED and "sizes, strides and dtypes only" in verdict["note"]:
                counts[record.operator] += 1
    lines = ["## Compared by sizes, strides and dtypes only", "", "| operator | samples | why |", "|---|---:|---|"]
    for operator in sorted(counts):
        base = operator.partition("/")[0]
        lines.append(f"| `{operator}` | {counts[operator]} | {UNWRITTEN.get(base) or RANDOM.get(base)} |")
    return "\n".join(lines)
