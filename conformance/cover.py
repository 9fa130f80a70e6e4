"""A small choice of cases that together reach every lowering the whole run reaches, for CI.

``python -m conformance.cover`` makes tests/conformance/sample.txt anew from the records of
``python -m conformance --each 3``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance import records
from conformance.cases import DTYPES, Case
from conformance.records import ROOT, Record
from conformance.workers import Choice
from torchkiln.lowering import LOWERINGS

SAMPLE = ROOT / "tests" / "conformance" / "sample.txt"
EACH = Choice(3)
_UNREACHED = "[not reached]"
_MADE_WITH = "# Made by `python -m conformance.cover` with torch "


@dataclass(frozen=True)
class Sample:
    """Cases with the lowerings each is there for, and the lowerings no case reaches.

    Both hold for the version of torch named: another one captures some operators as other calls, or not at all.
    """

    cases: Mapping[Case, tuple[str, ...]]
    unreached: frozenset[str]
    torch_version: str


def choose(found: Iterable[Record]) -> Sample:
    """Greedily the case that reaches the most lowerings not reached yet; among equals float types, then by name."""
    order = list(DTYPES)
    passed = [r for r in found if r.counts["passed"] == sum(r.counts.values())]
    names = {str(target) for target in LOWERINGS}
    missing = names & {name for r in passed for name in r.lowerings}
    unreached = names - missing
    chosen: dict[Case, tuple[str, ...]] = {}
    while missing:
        best = min(passed, key=lambda r: (-len(missing & r.lowerings.keys()), order.index(r.dtype), str(r.case)))
        gained = missing & best.lowerings.keys()
        chosen[best.case] = tuple(sorted(gained))
        missing -= gained
    return Sample(dict(sorted(chosen.items())), frozenset(unreached), torch.__version__)


def write(sample: Sample, path: Path = SAMPLE) -> None:
    lines = [
        "# Which operators CI checks: operator, dtype, and after the bar the lowerings it is here for.",
        f"{_MADE_WITH}{sample.torch_version}; three samples of each are compiled.",
    ]
    lines += [f"{case} | {' '.join(reached)}" for case, reached in sample.cases.items()]
    lines += ["", _UNREACHED, *sorted(sample.unreached)]
    path.write_text("\n".join(lines) + "\n")


def read(path: Path = SAMPLE) -> Sample:
    cases: dict[Case, tuple[str, ...]] = {}
    unreached: set[str] = set()
    version, listing = "", False
    for line in path.read_text().splitlines():
        if line == _UNREACHED:
            listing = True
        elif listing:
            unreached.add(line)
        elif line.startswith(_MADE_WITH):
            version = line.removeprefix(_MADE_WITH).partition(";")[0]
        elif line and not line.startswith("#"):
            case, _, reached = line.partition(" | ")
            operator, _, dtype = case.rpartition(" ")
            cases[Case(operator, dtype)] = tuple(reached.split())
    return Sample(cases, frozenset(unreached), version)


def main() -> None:
    found = [r for (_, chosen), r in records.read("kiln", any_source=True).items() if chosen == str(EACH)]
    if not found:
        raise SystemExit("no records: run `python -m conformance --each 3` first")
    sample = choose(found)
    write(sample)
    print(f"{len(sample.cases)} cases of {len(found)}; {len(sample.unreached)} lowerings are not reached")


if __name__ == "__main__":
    main()
