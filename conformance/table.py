"""docs/conformance.md from the records."""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from conformance.cases import DTYPES, RANDOM, UNWRITTEN
from conformance.check import CATEGORIES, EAGERS_NUMBERS, METADATA_ONLY, PASSED, ROUNDED
from conformance.records import ROOT, Record, source_hash

PAGE = ROOT / "docs" / "conformance.md"
OURS = "kiln"
_MARK = "<!-- another backend on the same samples -->"


def write(records: Sequence[Record], *, options: str) -> Path:
    """Write the page from ``records``, made by ``python -m conformance`` with these options."""
    if "--dynamic" in options:
        path = PAGE.with_name("conformance-dynamic.md")
        path.write_text(text(records, options))
    else:
        path = PAGE
        path.write_text(text(records, options, _comparison_on(path)))
    return path


def write_comparison(ours: Sequence[Record], theirs: Sequence[Record], *, backend: str, options: str) -> Path:
    """Put a section with the samples of ``theirs``, of another backend, and of ours into the page."""
    section = f"{_MARK}\n\n{_comparison(ours, theirs, backend, options)}"
    before = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(before.partition(_MARK)[0].rstrip() + "\n\n" + section + "\n")
    return PAGE


def text(records: Sequence[Record], options: str, comparison: str = "") -> str:
    """The page. Nothing in it is written by hand."""
    parts = [_head(records, options), _totals(records), _by_dtype(records), _not_passed(records)]
    parts += [_kinds(records), _metadata_only(records), comparison]
    return "\n\n".join(part for part in parts if part) + "\n"


def _comparison_on(page: Path) -> str:
    _, mark, section = page.read_text().partition(_MARK) if page.exists() else ("", "", "")
    return (mark + section).rstrip()


def _comparison(ours: Sequence[Record], theirs: Sequence[Record], backend: str, options: str) -> str:
    samples = sum(sum(r.counts.values()) for r in theirs)
    lines = [
        f"## The same samples compiled by {backend}",
        "",
        f"{len(theirs)} pairs of operator and dtype, {samples} samples, the same for both; torch {torch.__version__}.",
        f"Written by `python -m conformance {options} --table` on {commit()}.",
        "",
        f"| | {OURS} | {backend} |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {category} | {sum(r.counts[category] for r in ours)} | {sum(r.counts[category] for r in theirs)} |"
        for category in CATEGORIES
    ]
    lines += ["", f"What did not pass with {backend}, other than by capture:", ""]
    lines += ["| operator | samples | | reason (of the first) |", "|---|---|---|---|"]
    for category in CATEGORIES[1:-1]:
        for record in theirs:
            found = [v for v in record.verdicts if v["category"] == category]
            if found:
                reason = _plain(found[0]["reason"])
                lines.append(f"| `{record.operator}` | {record.dtype} {len(found)} | {category} | {reason} |")
    return "\n".join(lines)


def commit() -> str:
    """The state of the sources, as text: the commit, and whether they differ from it."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", "src"))
        )
    except (OSError, subprocess.CalledProcessError):
        return f"sources with digest {source_hash()}"
    return f"commit {head}" + (" with changes" if changed else "")


def _head(records: Sequence[Record], options: str) -> str:
    operators = len({r.operator for r in records})
    samples = sum(sum(r.counts.values()) for r in records)
    which = "A fixed choice of samples" if options else "Every sample input"
    symbolic = " and `dynamic=True`" if "--dynamic" in options else ""
    command = f"make conformance ARGS='{options}'" if options else "make conformance"
    return (
        "# Conformance\n\n"
        f"{which} of torch's operator database, compiled with `fullgraph=True`{symbolic} and compared"
        " with eager: values, dtypes, sizes, strides, what is left in the arguments, and gradients.\n"
        f"torch {torch.__version__}, CPU; {operators} operators, {len(records)} pairs of operator and dtype,"
        f" {samples} samples. Written by `{command}` on {commit()}.{_other_sources(records)}\n\n"
        "Values are equal when `torch.testing.assert_close` says so with its default tolerances. Where it does not,"
        " both are compared with a float64 run of eager, and ours must be about as near to it as eager's (within the"
        " default tolerance, or twice eager's largest error and one unit in the last place). Random operators are"
        " compiled twice: as they are by default, for sizes, strides and dtypes, and with `rng='eager'`, which must"
        " give eager's numbers.\n\n"
        "- **wrong**: another result than eager's\n"
        "- **crashed**: an unexpected error while compiling or running, a dead process, or the time limit\n"
        "- **not compiled**: declined with a reason; by default such a graph runs eagerly after a warning\n"
        "- **capture failed**: Dynamo or AOTAutograd could not capture the call, capture itself changed the result,"
        " or eager fails"
    )


def _other_sources(records: Sequence[Record]) -> str:
    """A sentence about records that were made with another state of the sources than there is now."""
    others = Counter(r.source for r in records if r.source != source_hash())
    if not others:
        return ""
    said = ", ".join(f"{pairs} with sources of digest {source}" for source, pairs in others.most_common())
    return f" The last run of {said}; the other {len(records) - others.total()} pairs with the sources of that commit."


def _totals(records: Sequence[Record]) -> str:
    totals = {c: sum(r.counts[c] for r in records) for c in CATEGORIES}
    whole = max(1, sum(totals.values()))
    judged = sum("judged by float64" in v["note"] for r in records for v in r.verdicts)
    lines = ["## Totals", "", "| | samples | share |", "|---|---:|---:|"]
    lines += [f"| {c} | {n} | {100 * n / whole:.2f} % |" for c, n in totals.items()]
    rounded = sum(ROUNDED in v["note"] for r in records for v in r.verdicts)
    drawn = sum(EAGERS_NUMBERS in v["note"] for r in records for v in r.verdicts)
    lines += [
        "",
        f"{drawn} of the samples that passed draw random numbers: eager's with `rng='eager'`.",
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
            if verdict["category"] == PASSED and METADATA_ONLY in verdict["note"]:
                counts[record.operator] += 1
    lines = ["## Compared by sizes, strides and dtypes only", "", "| operator | samples | why |", "|---|---:|---|"]
    for operator in sorted(counts):
        base = operator.partition("/")[0]
        lines.append(f"| `{operator}` | {counts[operator]} | {UNWRITTEN.get(base) or RANDOM.get(base)} |")
    return "\n".join(lines)
